// Memory that collectives hold until they are over, and longer if nobody uses their results.
//
// A pending tensor may wait for its reader for long: a gradient, for the optimizer. Its collective would keep
// inputs and buffers all that time, though it was over long ago. Collectives that hold more than a little are
// therefore noted here, and let go as soon as they are over: when another one starts, and on the CPU within
// some 20 ms, by a thread that runs while there are any. (On CUDA there is no such thread: another thread's
// questions could end the capture of a graph.)
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

#include "async/pending_collective.h"

namespace funcol {

// A new collective, noted here if it holds more than a little. What earlier ones hold is let go of if they
// are over.
c10::intrusive_ptr<PendingCollective> hold(PendingCollective::Start&& start);

// What a node of a backward pass holds while it starts its collectives.
//
// PyTorch's backward pass waits for each collective before it goes on. Here it goes on, and would run up the
// inputs of all that it has started. So if those that earlier nodes started hold more than 4 MiB by now, they
// are waited for first, and let go: the memory is that of one large collective at a time, and each still runs
// beside what is computed until the next one. Only what backward passes started is waited for: since PyTorch
// would have waited for it here, no peer is kept from coming.
class GradientCollectives {
 public:
  GradientCollectives();
  ~GradientCollectives();
  GradientCollectives(const GradientCollectives&) = delete;
  GradientCollectives& operator=(const GradientCollectives&) = delete;

  // `gradient`, or a copy if anyone else can reach its memory: autograd, which may hand it out as a .grad or
  // add to it in place, a hook, or the program. They may write to it as soon as the node has returned, while
  // the collective reads what this returns. `gradient` must be the node's own, held nowhere but there.
  static at::Tensor unshared(const at::Tensor& gradient);
  static std::vector<at::Tensor> unshared(at::TensorList gradients);
};

// Ends the thread, for good: at exit, before what it lets go of needs an interpreter that is gone.
void stop_letting_go();

}  // namespace funcol
