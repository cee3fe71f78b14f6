// CommTensor: a tensor that is handed to c10d's in-place collectives and waits for them by itself.
//
//   c = comm_tensor(x);  dist.all_reduce(c, async_op=True);  c + 1     waits at the addition
//
// Until a collective is started on it, it behaves as a plain tensor, and so do the results of operators on
// it, which are CommTensors too. Once one was started, the tensor itself and its views wait for it at their
// first use, as the results of funcol's own collectives do, and results of operators are plain. Further
// collectives may be started on it at any time.
//
// The collectives are c10d's dispatcher ops allreduce_, allgather_, _allgather_base_, reduce_scatter_,
// _reduce_scatter_base_, alltoall_, broadcast_, scatter_. Of their arguments the first, which they write,
// is what waits. Other tensors of the same memory, such as x above, do not.
#pragma once

#include <ATen/core/Tensor.h>

#include "async/pending_collective.h"

namespace funcol {

// A view of `tensor` to autograd, with its storage, metadata and version counter; `tensor` itself if it is a
// CommTensor already. Waits first if `tensor` is pending. TypeError for a tensor without strided storage of
// its own: sparse, or a subclass with __torch_dispatch__.
at::Tensor comm_tensor(const at::Tensor& tensor);

// False for an undefined tensor.
bool is_comm_tensor(const at::Tensor& tensor);

// Makes the CommTensors `written` wait for a collective that writes them. What wrote into their memory before
// must be settled.
void wait_in_place(at::TensorList written, PendingCollective::Start collective);

}  // namespace funcol
