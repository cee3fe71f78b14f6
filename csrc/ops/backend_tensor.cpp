#include "ops/backend_tensor.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "async/async_tensor.h"
#include "async/comm_tensor.h"
#include "async/wake_key.h"
#include "comm/process_group.h"

namespace funcol {
namespace {

// The size from which glibc's malloc maps memory anew, whatever was freed before, and unmaps it when it is
// freed.
constexpr size_t kMappedBytes = size_t{32} << 20;

// Requests large pages: mapping memory page by page takes longer than filling it.
void request_large_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t num_bytes) {
#ifdef MADV_HUGEPAGE
  static const auto page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t skipped = (page_bytes - reinterpret_cast<uintptr_t>(data) % page_bytes) % page_bytes;
  madvise(static_cast<std::byte*>(data) + skipped, num_bytes - skipped, MADV_HUGEPAGE);  // else: small ones
#endif
}

}  // namespace

at::Tensor fresh_tensor(at::IntArrayRef sizes, const at::Tensor& like) {
  if (!like.is_cpu()) {
    return at::empty(sizes, like.options());
  }
  at::Tensor tensor(at::detail::empty_cpu(sizes, like.scalar_type()));
  if (const auto num_bytes = tensor.nbytes(); num_bytes >= kMappedBytes) {
    request_large_pages(tensor.mutable_data_ptr(), num_bytes);
  }
  return tensor;
}

namespace {

at::Tensor alias_in_shape(const at::Tensor& contiguous, at::IntArrayRef sizes) {
  const auto& impl = *contiguous.unsafeGetTensorImpl();
  auto alias =
      at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(impl.unsafe_storage()),
                                               impl.key_set().remove(kWakeKey), impl.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  alias.unsafeGetTensorImpl()->set_storage_offset(impl.storage_offset());
  return alias;
}

// Returns an alias that has no Python object: a thread that must not wait for the GIL, such as a backend's,
// may drop the next-to-last reference.
at::Tensor alias_for_backend(const at::Tensor& contiguous) {
  const auto& impl = *contiguous.unsafeGetTensorImpl();
  const bool is_plain = AsyncTensorImpl::can_wrap(contiguous) ||
                        (AsyncTensorImpl::of(contiguous) != nullptr && !is_comm_tensor(contiguous));
  const bool has_plain_memory = (impl.is_cpu() || impl.is_cuda()) && impl.has_storage();
  return is_plain && has_plain_memory && !impl.is_python_dispatch()
             ? alias_in_shape(contiguous, contiguous.sizes())
             : contiguous;
}

}  // namespace

at::Tensor in_shape(at::Tensor contiguous, at::IntArrayRef sizes) {
  if (contiguous.use_count() > 1) {
    return alias_in_shape(contiguous, sizes);
  }
  contiguous.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return contiguous;
}

at::Tensor contiguous_input(const at::Tensor& tensor) {
  settle(tensor);
  if (tensor._is_zerotensor()) {  // which has no memory
    return at::zeros(tensor.sizes(), tensor.options());
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    return tensor.resolve_conj().resolve_neg().contiguous();
  }
  return tensor.is_contiguous() ? alias_for_backend(tensor) : tensor.contiguous();
}

at::Tensor private_input(const at::Tensor& tensor) {
  auto input = contiguous_input(tensor);
  return input.unsafeGetTensorImpl()->unsafe_storage().is_alias_of(
             tensor.unsafeGetTensorImpl()->unsafe_storage())
             ? contiguous_copy(input)
             : input;
}

bool is_plain_in_memory(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.is_quantized() && !tensor._is_zerotensor();
}

at::Tensor contiguous_copy(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || !is_plain_in_memory(tensor)) {
    return at::clone(tensor, at::MemoryFormat::Contiguous);
  }
  auto copy = fresh_tensor(tensor.sizes(), tensor);
  if (tensor.numel() > at::internal::GRAIN_SIZE) {
    return copy.copy_(tensor);
  }
  // ATen would copy this on one thread, too, and take longer to start than to copy.
  if (tensor.numel() > 0) {
    std::memcpy(copy.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
  }
  return copy;
}

std::vector<at::Tensor> contiguous_copies(at::TensorList tensors) {
  const bool in_one_launch =
      tensors.size() > 1 && std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
        return tensor.is_cuda() && is_plain_in_memory(tensor);
      });
  std::vector<at::Tensor> copies;
  copies.reserve(tensors.size());
  for (const auto& tensor : tensors) {
    copies.push_back(in_one_launch ? fresh_tensor(tensor.sizes(), tensor) : contiguous_copy(tensor));
  }
  if (in_one_launch) {
    at::_foreach_copy_(copies, tensors);
  }
  return copies;
}

at::Tensor wire_for_reduction(const at::Tensor& contiguous) {
  return contiguous.is_complex() ? at::view_as_real(contiguous) : contiguous;
}

c10d::ReduceOp op_for_reduction(const c10d::ReduceOp& reduce_op, c10::ScalarType dtype) {
  const bool adds_bools = dtype == c10::ScalarType::Bool && reduce_op.op_ == c10d::ReduceOp::SUM;
  return adds_bools ? c10d::ReduceOp(c10d::ReduceOp::MAX) : reduce_op;
}

at::Tensor wire_for_movement(const at::Tensor& contiguous, c10d::ProcessGroup& group) {
  auto wire = contiguous.dim() == 0 ? contiguous.view({1}) : contiguous;
  if (contiguous.is_complex()) {
    wire = at::view_as_real(wire);
  }
  if (!gloo_carries(wire.scalar_type()) && backend_name(group, contiguous.device().type()) == "gloo") {
    wire = wire.unsqueeze(-1).view(c10::ScalarType::Byte);
  }
  return wire;
}

void check_reduction(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op, c10d::ProcessGroup& group,
                     const char* op) {
  if (!is_supported_everywhere(reduce_op, tensor.scalar_type())) {
    check_reduce_op(reduce_op, tensor.scalar_type(), backend_name(group, tensor.device().type()), op);
  }
}

namespace {

constexpr c10::DispatchKeySet kNonDenseKeys({c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr,
                                             c10::DispatchKey::Quantized, c10::DispatchKey::NestedTensor,
                                             c10::DispatchKey::MkldnnCPU});

struct TensorKind {
  std::string name;
  const char* remedy;
};

TensorKind kind_of(const at::Tensor& tensor) {
  if (tensor.is_quantized()) {
    return {c10::str("quantized (", tensor.scalar_type(), ")"),
            "t.int_repr() where scales agree, or t.dequantize()"};
  }
  if (tensor.is_nested()) {
    return {"nested", "the dense tensor behind it, t.values(), or a padded one"};
  }
  return {c10::str("of layout ", tensor.layout()), "t.to_dense(), or the dense tensors it is made of"};
}

[[noreturn]] void raise_not_dense(const at::Tensor& tensor, const char* op) {
  const auto kind = kind_of(tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(false, "funcol::", op, ": a tensor is ", kind.name,
                              ". Collectives carry dense tensors. Pass ", kind.remedy, ".");
}

bool has_tangent(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->autograd_meta() != nullptr && tensor._fw_grad(/*level=*/0).defined();
}

}  // namespace

void check_dense(at::TensorList tensors, const char* op) {
  for (const auto& tensor : tensors) {
    if (tensor.key_set().has_any(kNonDenseKeys)) {
      raise_not_dense(tensor, op);
    }
  }
}

void check_no_tangents(at::TensorList tensors, const char* op) {
  const auto found = std::ranges::find_if(
      tensors, [](const at::Tensor& tensor) { return tensor.defined() && has_tangent(tensor); });
  TORCH_CHECK_NOT_IMPLEMENTED(
      found == tensors.end(), "funcol::", op, ": tensor ", found - tensors.begin(),
      " has a tangent, and collectives have no forward-mode derivative. Differentiate in reverse mode; or, "
      "if it is linear, call it on primal and tangent, and make a dual tensor of the two results.");
}

void check_in_place(const at::Tensor& tensor, const char* op) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "funcol::", op, ": the tensor of shape ", tensor.sizes(),
                    " has strides ", tensor.strides(),
                    ". An in-place collective needs a contiguous tensor: call .contiguous() first.");
}

void check_one_device(at::TensorList tensors, const char* op) {
  check_dense(tensors, op);
  for (size_t i = 1; i < tensors.size(); ++i) {
    TORCH_CHECK_VALUE(tensors[i].device() == tensors[0].device(), "funcol::", op, ": tensor ", i, " is on ",
                      tensors[i].device(), ", tensor 0 on ", tensors[0].device(),
                      ". A coalesced call needs one device: move them, or call once per device.");
  }
}

void check_one_device_and_dtype(at::TensorList tensors, const char* op) {
  check_one_device(tensors, op);
  for (size_t i = 1; i < tensors.size(); ++i) {
    TORCH_CHECK_TYPE(tensors[i].scalar_type() == tensors[0].scalar_type(), "funcol::", op, ": tensor ", i,
                     " is ", tensors[i].scalar_type(), ", tensor 0 is ", tensors[0].scalar_type(),
                     ". A coalesced call needs one dtype: convert them, or call once per dtype.");
  }
}

void check_rank(int64_t rank, const c10d::ProcessGroup& group, const char* what, const char* op) {
  TORCH_CHECK_VALUE(0 <= rank && rank < group.getSize(), "funcol::", op, ": ", what, " is rank ", rank,
                    ", but group '", group_name(group), "' has ranks 0 to ", group.getSize() - 1,
                    ". Pass a rank within the group.");
}

void check_permute(at::IntArrayRef destinations, const c10d::ProcessGroup& group) {
  constexpr auto kOp = "permute_tensor";
  TORCH_CHECK_VALUE(static_cast<int64_t>(destinations.size()) <= group.getSize(), "funcol::", kOp,
                    ": src_dst has ", destinations.size(), " entries, but group '", group_name(group),
                    "' has ", group.getSize(), " ranks. Pass the destination of each rank that sends.");
  for (const int64_t destination : destinations) {
    check_rank(destination, group, "an entry of src_dst", kOp);
  }
}

void check_dim_per_tensor(at::TensorList inputs, at::IntArrayRef dims, const char* op) {
  TORCH_CHECK_VALUE(dims.size() == inputs.size(), "funcol::", op, ": ", dims.size(), " scatter dims for ",
                    inputs.size(), " tensors. Pass one dim per tensor.");
}

void check_has_dims(const at::Tensor& tensor, const char* op) {
  TORCH_CHECK_VALUE(tensor.dim() > 0, "funcol::", op,
                    ": a 0-dim tensor has no dim to cut along. Pass one with dims.");
}

int64_t wrap_dim(int64_t dim, const at::Tensor& tensor, const char* op) {
  const int64_t num_dims = std::max<int64_t>(tensor.dim(), 1);  // a 0-dim tensor counts as shape (1)
  TORCH_CHECK_INDEX(-num_dims <= dim && dim < num_dims, "funcol::", op, ": dim is ", dim,
                    ", but the tensor of shape ", tensor.sizes(), " has dims ", -num_dims, " to ",
                    num_dims - 1, ". Pass a dim within it.");
  return dim < 0 ? dim + num_dims : dim;
}

}  // namespace funcol
