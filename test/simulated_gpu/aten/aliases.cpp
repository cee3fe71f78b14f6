#include "aliases.h"

#include <ATen/core/List.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <optional>
#include <utility>

#include "simulated_gpu.h"

namespace simulated_gpu::aten {
namespace {

at::Tensor with_bits_of(const at::Tensor& tensor, at::Tensor other) {
  if (tensor.is_conj()) {
    other._set_conj(true);
  }
  if (tensor.is_neg()) {
    other._set_neg(true);
  }
  return other;
}

void check_storage(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  const size_t needed = static_cast<size_t>(last + 1) * tensor.itemsize();
  TORCH_CHECK(needed <= tensor.storage().nbytes(), "simulated GPU: a tensor of sizes ", tensor.sizes(),
              " and strides ", tensor.strides(), " is used whose storage has ", tensor.storage().nbytes(),
              " of the ", needed, " bytes that it spans: its memory was freed.");
}

}  // namespace

at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) {
    return tensor;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, "simulated GPU: tensors of layout ",
                              tensor.layout(), " are not simulated, only strided ones.");
  void* bytes = nullptr;
  if (tensor.numel() > 0) {
    check_storage(tensor);
    bytes = host_address(tensor.unsafeGetTensorImpl()->mutable_data());
  }
  const auto options = tensor.options().device(at::kCPU).pinned_memory(false).requires_grad(false);
  const at::Device device(at::kCPU);
  return with_bits_of(tensor, at::from_blob(
                                  bytes, tensor.sizes(), tensor.strides(), [](void*) {}, options, device));
}

at::Tensor kernel_argument(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) {
    return cpu_alias(tensor);
  }
  at::Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

at::Tensor meta_like(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) {
    return tensor;
  }
  const auto options = tensor.options().device(at::kMeta).pinned_memory(false);
  return with_bits_of(tensor, at::empty_strided(tensor.sizes(), tensor.strides(), options));
}

at::Tensor empty_on(at::Device device, const at::Tensor& shape) {
  return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device));
}

c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& map) {
  if (value.isTensor()) {
    return map(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(map(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      std::optional<at::Tensor> mapped = tensor ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt;
      list.push_back(std::move(mapped));
    }
    return list;
  }
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& use) {
  static_cast<void>(map_tensors(value, [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      use(tensor);
    }
    return tensor;
  }));
}

}  // namespace simulated_gpu::aten
