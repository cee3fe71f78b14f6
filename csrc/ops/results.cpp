// Makes the caller's tensors of a started collective, and waits for them.
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "async/in_flight.h"
#include "async/pending_collective.h"
#include "comm/gil_release.h"
#include "comm/orphaned_works.h"
#include "compat/missing_operators.h"
#include "ops/meta.h"
#include "ops/operator.h"
#include "ops/schemas.h"

namespace funcol {
namespace {

// The Work in PyTorch's registry of a receive that a pending tensor waits for. It replaces the backend's own
// Work, which must not be waited for twice.
class SettlingWork final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    pending_->settle();
    return true;
  }
  bool isCompleted() override { return pending_->is_settled(); }

  void set_pending(AsyncTensorImpl::PendingPtr pending) { pending_ = std::move(pending); }

 private:
  AsyncTensorImpl::PendingPtr pending_;
};

// Returns a tensor over the memory of `buffer`, without its autograd history, for AsyncTensorImpl::wrap().
// Returns `buffer` itself if it has no history: wrap() makes a tensor of its own.
at::Tensor without_history(const at::Tensor& buffer) {
  return torch::autograd::impl::get_autograd_meta(buffer) == nullptr ? buffer : buffer.detach();
}

}  // namespace

void note_written(at::TensorList tensors) {
  for (const auto& tensor : tensors) {
    if (tensor.defined() && !tensor.is_inference()) {
      torch::autograd::impl::bump_version(tensor);
    }
  }
}

std::vector<at::Tensor> as_pending(StartedCollective start) {
  sweep_some_orphans();
  std::vector<at::Tensor> results;
  results.reserve(start.outputs.size());
  const auto outputs = start.outputs;
  auto pending = make_pending_collective(std::move(start));
  for (const auto& output : outputs) {
    results.push_back(AsyncTensorImpl::wrap(output, pending));
  }
  return results;
}

at::Tensor as_sole_pending(StartedCollective start) {
  sweep_some_orphans();
  const auto output = start.outputs[0];  // a copy: make_pending_collective() takes the StartedCollective
  return AsyncTensorImpl::wrap(output, make_pending_collective(std::move(start)));
}

std::vector<at::Tensor> as_registered(const StartedCollective& start) {
  TORCH_INTERNAL_ASSERT(!start.epilogue, "PyTorch's registry cannot run the epilogue of ", start.op);
  note_registered(start.op, start.group, start.outputs, start.work);
  for (const auto& output : start.outputs) {
    c10d::register_work(output, start.work);
  }
  return start.outputs;
}

std::vector<at::Tensor> as_overwritten(const StartedCollective& start) {
  note_written(start.outputs);
  return as_registered(start);
}

std::vector<at::Tensor> as_received(StartedCollective start, const std::vector<size_t>& received) {
  if (received.empty()) {
    return as_pending(std::move(start));
  }
  std::vector<at::Tensor> buffers;
  for (const auto index : received) {
    buffers.push_back(start.outputs[index]);
    note_written(start.outputs[index]);
    start.outputs[index] = without_history(start.outputs[index]);
  }
  const auto work = c10::make_intrusive<SettlingWork>();
  start.epilogue = [registered = c10::weak_intrusive_ptr<c10d::Work>(work)](const StartedCollective&) {
    if (const auto work = registered.lock()) {
      c10d::unregister_work(work);
    }
  };
  auto results = as_pending(std::move(start));
  work->set_pending(AsyncTensorImpl::of(results[received[0]])->pending());
  for (const auto& buffer : buffers) {
    c10d::register_work(buffer, work);
  }
  return results;
}

at::Tensor wait_tensor(const at::Tensor& tensor) {
  settle(tensor);
  // An operator that is called from a kernel in Python runs with the GIL, which a thread of the backend may
  // need to release a tensor of Python's before it gets to this tensor's Work.
  run_blocking([&] { wait_on_registry(tensor); });
  return tensor;
}

namespace {

using Tensors = std::vector<at::Tensor>;

Tensors wait_tensors(at::TensorList tensors) {
  for (const auto& tensor : tensors) {
    wait_tensor(tensor);
  }
  return tensors.vec();
}

at::Tensor wait_meta(const at::Tensor& tensor) { return at::empty_like(tensor); }
Tensors list_meta(at::TensorList tensors) { return meta_of_each(tensors, wait_meta); }
Tensors core_list_meta(at::TensorList tensors) { return tensors.vec(); }

const auto kWait = forwarded(
    {.name = "wait_tensor"}, [] { return torch::CppFunction(wait_tensor); }, torch::CppFunction(wait_meta),
    [](Arguments arguments, const char*) { return Tensors{wait_tensor(arguments[0].toTensor())}; });
const auto kWaitForList = forwarded(
    {.name = "wait_tensors"}, [] { return torch::CppFunction(wait_tensors); }, torch::CppFunction(list_meta),
    [](Arguments arguments, const char*) { return wait_tensors(arguments[0].toTensorVector()); });

}  // namespace
}  // namespace funcol

TORCH_LIBRARY_FRAGMENT(_c10d_functional, m) {
  funcol::define_operators();
  funcol::compat::define_if_missing(
      m, "wait_tensors", [] { return torch::CppFunction(funcol::wait_tensors); }, funcol::core_list_meta);
}
