#include "async/async_tensor.h"
#include "async/in_flight.h"
#include "comm/gil_release.h"
#include "compat/missing_operators.h"
#include "ops/meta.h"
#include "ops/operator.h"

namespace funcol {

at::Tensor wait_tensor(const at::Tensor& tensor) {
  settle(tensor);
  // An operator that was called from a kernel in Python is called with the GIL, which a thread of the backend
  // may need to let go of a tensor of Python's before it gets to this tensor's Work.
  run_blocking([&] { wait_on_registry(tensor); });
  return tensor;
}

namespace {

using Tensors = std::vector<at::Tensor>;

constexpr auto kList = "wait_tensors(Tensor[] tensors) -> Tensor[]";

Tensors wait_tensors(at::TensorList tensors) {
  for (const auto& tensor : tensors) {
    wait_tensor(tensor);
  }
  return tensors.vec();
}

at::Tensor meta(const at::Tensor& tensor) { return at::empty_like(tensor); }
Tensors list_meta(at::TensorList tensors) { return meta_of_each(tensors, meta); }
Tensors core_list_meta(at::TensorList tensors) { return tensors.vec(); }

const auto kWait = forwarded(
    {.schema = "wait_tensor(Tensor tensor) -> Tensor"}, [] { return torch::CppFunction(wait_tensor); },
    torch::CppFunction(meta),
    [](Arguments arguments, const char*) { return Tensors{wait_tensor(arguments[0].toTensor())}; });
const auto kWaitForList = forwarded(
    {.schema = kList}, [] { return torch::CppFunction(wait_tensors); }, torch::CppFunction(list_meta),
    [](Arguments arguments, const char*) { return wait_tensors(arguments[0].toTensorVector()); });

}  // namespace
}  // namespace funcol

TORCH_LIBRARY_FRAGMENT(_c10d_functional, m) {
  funcol::compat::define_if_missing(
      m, funcol::kList, [] { return torch::CppFunction(funcol::wait_tensors); }, funcol::core_list_meta);
}
