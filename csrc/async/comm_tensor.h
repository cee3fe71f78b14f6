// CommTensor: a tensor that waits by itself for c10d's in-place collectives on it.
//
//   c = comm_tensor(x);  dist.all_reduce(c, async_op=True);  c + 1     waits at the addition
//
// Before the first collective, a CommTensor behaves as a plain tensor, and operators on it return
// CommTensors. From the first collective on, the tensor and its views wait at their first use, as the results
// of funcol's own collectives do, and operators return plain tensors. Further collectives may be started on
// it at any time.
//
// The collectives are c10d's dispatcher ops allreduce_, allgather_, _allgather_base_, reduce_scatter_,
// _reduce_scatter_base_, alltoall_, broadcast_, scatter_. They write their first argument, and CommTensors in
// it wait. Other tensors of the same memory, such as x above, do not wait.
#pragma once

#include <ATen/core/Tensor.h>

#include "async/started_collective.h"

namespace funcol {

// A CommTensor with the storage, metadata and version counter of `tensor`, to autograd a view; `tensor`
// itself if it is a CommTensor already. Waits first if `tensor` is pending. TypeError for a tensor without
// strided storage of its own: sparse, or a subclass with __torch_dispatch__.
at::Tensor comm_tensor(const at::Tensor& tensor);

// False for an undefined tensor.
bool is_comm_tensor(const at::Tensor& tensor);

// Makes the CommTensors `written` wait for a collective that writes them. Earlier collectives on their memory
// must be settled.
void wait_in_place(at::TensorList written, StartedCollective collective);

}  // namespace funcol
