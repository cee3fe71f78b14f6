#include "copies.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "aliases.h"
#include "issue.h"
#include "places.h"

namespace simulated_gpu::aten {
namespace {

void copy_on_one_device(const at::Tensor& target, const at::Tensor& source) {
  const c10::cuda::CUDAGuard guard(target.device());
  issue("aten::copy_", {.read = {source}, .written = {target}},
        [to = cpu_alias(target), from = cpu_alias(source)] { to.copy_(from); });
}

bool is_one_block_like(const at::Tensor& target, const at::Tensor& source) {
  return target.scalar_type() == source.scalar_type() && target.is_contiguous() && source.is_contiguous() &&
         target.is_conj() == source.is_conj() && target.is_neg() == source.is_neg();
}

// Through contiguous tensors of one type, which PyTorch copies by cudaMemcpy; else it would launch a kernel
// that reads another device's memory.
void copy_between_devices(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  if (is_one_block_like(target, source)) {
    at::native::copy_(target, source, non_blocking);
    return;
  }
  const at::Tensor sent = source.resolve_conj().resolve_neg().to(target.scalar_type()).contiguous();
  at::Tensor received = at::empty(target.sizes(), target.options());
  at::native::copy_(received, sent, non_blocking);
  copy_on_one_device(target, received);
}

at::Tensor& copy_kernel(at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  const TracedCall call;
  const AtOnePlace place;
  // Zeros without memory are copied as a fill, and refused as a target.
  if (!target.is_cuda() || !source.is_cuda() || target._is_zerotensor() || source._is_zerotensor()) {
    return at::native::copy_(target, source, non_blocking);
  }
  const at::Tensor expanded = source.sizes() == target.sizes() ? source : source.expand(target.sizes());
  at::assert_no_internal_overlap(target);
  if (target.numel() == 0) {
    return target;
  }
  if (target.device() == source.device()) {
    copy_on_one_device(target, expanded);
  } else {
    copy_between_devices(target, expanded, non_blocking);
  }
  return target;
}

}  // namespace

void register_copies() {
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  library->impl("copy_", TORCH_FN(copy_kernel));
}

}  // namespace simulated_gpu::aten
