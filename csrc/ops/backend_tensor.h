// Tensors as a backend can carry them, and the checks that all collectives share.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "comm/group_ref.h"
#include "comm/reduce_op.h"

namespace funcol {

// The guard of a collective's kernel, which runs below autograd: nothing in it is recorded.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// Returns a new contiguous tensor of the dtype and device of `like`, uninitialized: every element will be
// received. A large tensor on the CPU requests large pages. To be called before a collective on a device is
// started: a wait for the collective then covers earlier work on that memory, too.
at::Tensor fresh_tensor(at::IntArrayRef sizes, const at::Tensor& like);

// Returns a list of one tensor, which an initializer list would copy.
inline std::vector<at::Tensor> as_list(at::Tensor tensor) {
  std::vector<at::Tensor> list;
  list.push_back(std::move(tensor));
  return list;
}

// Returns the memory of a fresh contiguous tensor in another shape: a view, made below the dispatcher, or the
// tensor itself if nothing else refers to it.
at::Tensor in_shape(at::Tensor contiguous, at::IntArrayRef sizes);

// Returns `tensor` settled, contiguous, with conjugation and negation resolved, to be read by a backend. The
// result shares the memory of `tensor` unless that has to be copied.
at::Tensor contiguous_input(const at::Tensor& tensor);

// Returns contiguous_input() in memory of its own: for a call after which the caller may write to `tensor`
// (see async/pending_collective.h).
at::Tensor private_input(const at::Tensor& tensor);

// Returns true if the elements of `tensor` lie in order in memory, as they are.
bool is_plain_in_memory(const at::Tensor& tensor);

// Returns a contiguous copy of `tensor`, which is settled.
at::Tensor contiguous_copy(const at::Tensor& tensor);

// Returns the contiguous_copy() of each tensor. On CUDA, those of contiguous tensors take one launch.
std::vector<at::Tensor> contiguous_copies(at::TensorList tensors);

// Returns a view of a contiguous tensor that the backend can reduce: complex numbers as pairs of reals.
at::Tensor wire_for_reduction(const at::Tensor& contiguous);

// Returns the operator for the backend, which adds bools as bytes: for them "sum" becomes "max", whatever the
// number of ranks.
c10d::ReduceOp op_for_reduction(const c10d::ReduceOp& reduce_op, c10::ScalarType dtype);

// Returns a view of a contiguous tensor that the backend can move: complex numbers as pairs of reals, a dtype
// that the backend does not know as bytes. The result has at least one dim; ranks still concatenate or split
// dim 0.
at::Tensor wire_for_movement(const at::Tensor& contiguous, c10d::ProcessGroup& group);

// Raises if the backend cannot apply `reduce_op` to tensors like `tensor`.
void check_reduction(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op, c10d::ProcessGroup& group,
                     const char* op);

// Raises NotImplementedError if a tensor is sparse, quantized, nested or in a layout of a library's own: a
// backend would interpret such memory as numbers.
void check_dense(at::TensorList tensors, const char* op);

// Raises NotImplementedError if one of the tensors, which may be undefined, has a tangent. For a tensor that
// functorch transforms have wrapped, checks the outermost wrapper.
//
// For forward-mode differentiation each rank would have to know which tensors of the others have tangents,
// before it could send its own. A result without its tangent would be a derivative of zero.
void check_no_tangents(at::TensorList tensors, const char* op);

// Raises unless an in-place collective can write into `tensor`: unless it is contiguous.
void check_in_place(const at::Tensor& tensor, const char* op);

// Raises unless all tensors are dense and on one device.
void check_one_device(at::TensorList tensors, const char* op);

// Raises unless all tensors have one device and one dtype.
void check_one_device_and_dtype(at::TensorList tensors, const char* op);

// Raises unless 0 <= rank < number of ranks. `what` is the rank's name in the message: "source".
void check_rank(int64_t rank, const c10d::ProcessGroup& group, const char* what, const char* op);

// Raises unless each of `destinations`, of one sending rank each, is a rank of the group.
void check_permute(at::IntArrayRef destinations, const c10d::ProcessGroup& group);

// Raises unless there are as many dims as tensors.
void check_dim_per_tensor(at::TensorList inputs, at::IntArrayRef dims, const char* op);

// Raises for a 0-dim tensor, which has nothing to cut along.
void check_has_dims(const at::Tensor& tensor, const char* op);

// Returns `dim`, which may count from the end, in [0, tensor.dim()). Raises IndexError if there is no such
// dim.
int64_t wrap_dim(int64_t dim, const at::Tensor& tensor, const char* op);

}  // namespace funcol
