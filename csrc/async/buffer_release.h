// Releases the memory of collectives that have completed while their results are still unused.
//
// A pending tensor may wait long for its reader, like a gradient for the optimizer. Its collective would keep
// inputs and buffers all that time. Collectives that hold more than 4 KiB are therefore tracked here, and
// release this memory after they have completed: when another collective starts, and on the CPU within some
// 20 ms, by a thread that runs while collectives are tracked. (On CUDA there is no such thread: a query from
// another thread could end the capture of a graph.)
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

#include "async/pending_collective.h"

namespace funcol {

// Makes a collective and tracks it if it holds more than 4 KiB. Releases the memory of earlier collectives
// that have completed.
c10::intrusive_ptr<PendingCollective> make_pending_collective(StartedCollective&& start);

// A scope in which a node of a backward pass starts its collectives.
//
// PyTorch's backward pass waits for each collective before it goes on. Ours goes on, and the inputs of all
// collectives that it has started would add up. So if the collectives of earlier nodes hold more than 4 MiB,
// the node first waits for them: memory is held by one large collective at a time, which still overlaps the
// computation up to the next one. Collectives that no backward pass started are not waited for: PyTorch would
// not wait for them here either, and a peer may not have reached them yet.
class GradientCollectives {
 public:
  GradientCollectives();
  ~GradientCollectives();
  GradientCollectives(const GradientCollectives&) = delete;
  GradientCollectives& operator=(const GradientCollectives&) = delete;

  // Returns `gradient`, or a copy if anything else can reach its memory: autograd, which may hand it out as a
  // .grad or add to it in place, a hook, or the program. They may write to it once the node has returned,
  // while the collective still reads. `gradient` must be the node's own, held nowhere else.
  static at::Tensor unshared(const at::Tensor& gradient);
  static std::vector<at::Tensor> unshared(at::TensorList gradients);
};

// Ends the thread permanently, at exit: tensors that it releases may need the interpreter.
void stop_release_thread();

}  // namespace funcol
