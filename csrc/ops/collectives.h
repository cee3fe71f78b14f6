// The collectives, as C++ functions.
//
// Each start_x checks its arguments, changes layout where the wire needs it, hands the collective to the
// group's backend and returns at once. It returns the collective's StartedCollective: the outputs, and the
// buffers that have to live until the Work has completed. as_pending() makes tensors of a StartedCollective
// that wait by themselves, the results of funcol's operators; as_registered() makes plain tensors on which
// wait_tensor has to be called, the results of PyTorch's _c10d_functional operators.
//
// Inputs may be pending, non-contiguous, complex, bool, zero-size; they are not modified. Autograd records
// nothing here. Errors are raised before anything is sent: ValueError, TypeError or NotImplementedError that
// name the op.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "async/started_collective.h"
#include "comm/group_ref.h"
#include "comm/reduce_op.h"

namespace funcol {

// Reduces over all ranks. The output is contiguous and has the shape of `input`.
StartedCollective start_all_reduce(const at::Tensor& input, const c10d::ReduceOp& reduce_op,
                                   const GroupPtr& group);
StartedCollective start_all_reduce_coalesced(at::TensorList inputs, const c10d::ReduceOp& reduce_op,
                                             const GroupPtr& group);

// Concatenates the inputs of all ranks, in rank order, along `dim`. The output is contiguous. A 0-dim input
// counts as shape (1).
StartedCollective start_all_gather(const at::Tensor& input, int64_t dim, const GroupPtr& group);
StartedCollective start_all_gather_coalesced(at::TensorList inputs, const GroupPtr& group);

// Gives each rank its share, along `dim`, of the sum (or other reduction) of all inputs. The size of `dim`
// must be a multiple of the number of ranks.
StartedCollective start_reduce_scatter(const at::Tensor& input, const c10d::ReduceOp& reduce_op, int64_t dim,
                                       const GroupPtr& group);
StartedCollective start_reduce_scatter_coalesced(at::TensorList inputs, const c10d::ReduceOp& reduce_op,
                                                 at::IntArrayRef dims, const GroupPtr& group);

// Gathers, or reduces and scatters, parts that differ in size: rank r has, or gets, split_sizes[r] along
// `dim`. All ranks pass the same list; without one the sizes are equal.
StartedCollective start_uneven_all_gather(const at::Tensor& input, int64_t dim, const GroupPtr& group,
                                          at::OptionalIntArrayRef split_sizes);
StartedCollective start_uneven_reduce_scatter(const at::Tensor& input, const c10d::ReduceOp& reduce_op,
                                              int64_t dim, const GroupPtr& group,
                                              at::OptionalIntArrayRef split_sizes);

// Sends input_splits[r] rows of dim 0 to rank r and receives output_splits[r] rows from it. If both lists are
// empty, the shares are equal.
StartedCollective start_all_to_all(const at::Tensor& input, at::IntArrayRef output_splits,
                                   at::IntArrayRef input_splits, const GroupPtr& group);

// Sends inputs[r] to rank r; output r, of output_splits[r] rows, comes from rank r. The tensors have one
// dtype and device, and differ along dim 0 at most. Without `output_splits`, all have the same number of
// rows.
StartedCollective start_all_to_all_list(at::TensorList inputs, at::IntArrayRef output_splits,
                                        const GroupPtr& group);

// Sends equal parts along `split_dim`, one to each rank, and concatenates the received parts along
// `concat_dim`. If `stacks`, `split_dim` has one slice per rank, sent without that dim, and `concat_dim` is a
// new one.
StartedCollective start_all_to_all_dims(const at::Tensor& input, int64_t split_dim, int64_t concat_dim,
                                        bool stacks, const GroupPtr& group);

// Sends the full tensor of rank m to rank destinations[m]; ranks past the end of `destinations` send nothing.
// The output has the shape of `input` if one rank sends here; else it is the received tensors, concatenated
// along dim 0 in the order of the senders.
StartedCollective start_permute(const at::Tensor& input, at::IntArrayRef destinations, const GroupPtr& group);

// Gives every rank the tensor of group rank `source`.
StartedCollective start_broadcast(const at::Tensor& input, int64_t source, const GroupPtr& group);

// Reduces over all ranks. The output is the result on group rank `destination`, zeros on the others.
StartedCollective start_reduce(const at::Tensor& input, const c10d::ReduceOp& reduce_op, int64_t destination,
                               const GroupPtr& group);

// Gives each rank its part, along `dim`, of the tensor of group rank `source`. All ranks pass a tensor of the
// full tensor's shape and dtype; only the source's data is read.
StartedCollective start_scatter(const at::Tensor& input, int64_t source, int64_t dim, const GroupPtr& group,
                                at::OptionalIntArrayRef split_sizes);

// Concatenates the tensors of all ranks along `dim` on group rank `destination`. The output of the other
// ranks has size 0 along `dim`.
StartedCollective start_gather(const at::Tensor& input, int64_t destination, int64_t dim,
                               const GroupPtr& group, at::OptionalIntArrayRef split_sizes);

// The exchange of rows between all ranks that all_to_all, permute, scatter and gather are made of.

// Sends input_splits[r] rows of `source` to rank r, and receives output_splits[r] rows of `out` from it. Both
// tensors are contiguous, of one dtype, and of the same sizes but for dim 0.
c10::intrusive_ptr<c10d::Work> exchange(const at::Tensor& source, const at::Tensor& out,
                                        std::vector<int64_t> output_splits, std::vector<int64_t> input_splits,
                                        c10d::ProcessGroup& group);

// Exchanges elements of a flat tensor between those ranks alone that have elements for each other: by sends
// and receives between pairs, which no backend has to set up for the entire group. The output is the received
// elements, in the order of the senders.
StartedCollective start_exchange_in_pairs(const at::Tensor& input, at::IntArrayRef output_splits,
                                          at::IntArrayRef input_splits, const GroupPtr& group);

// Returns the splits of an exchange between this rank and rank `root` alone: `size` there, 0 elsewhere.
template <typename Size>
std::vector<Size> splits_of_root(int64_t root, const Size& size, const c10d::ProcessGroup& group) {
  std::vector<Size> splits(group.getSize(), Size(0));
  splits[root] = size;
  return splits;
}

// Raises the errors of the functions above, and starts nothing: for calls that go through the dispatcher.
void check_all_reduce(at::TensorList inputs, const c10d::ReduceOp& reduce_op, c10d::ProcessGroup& group,
                      const char* op);
void check_all_gather(at::TensorList inputs, int64_t dim, const char* op);
void check_reduce_scatter(at::TensorList inputs, const c10d::ReduceOp& reduce_op, at::IntArrayRef dims,
                          c10d::ProcessGroup& group, const char* op);
void check_all_to_all(const at::Tensor& input, at::IntArrayRef output_splits, at::IntArrayRef input_splits,
                      const c10d::ProcessGroup& group);

// Writes into contiguous tensors of the caller, which are the StartedCollective's outputs. `op` is the name
// in messages. A flat gather or scatter along dim 0 takes any shapes of the right numbers of elements.
StartedCollective start_all_reduce_(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op,
                                    const GroupPtr& group, const char* op = "all_reduce_");
StartedCollective start_all_reduce_coalesced_(at::TensorList tensors, const c10d::ReduceOp& reduce_op,
                                              const GroupPtr& group);
StartedCollective start_broadcast_(const at::Tensor& tensor, int64_t source, const GroupPtr& group,
                                   const char* op = "broadcast_");
StartedCollective start_all_gather_out(const at::Tensor& input, const at::Tensor& out, const GroupPtr& group,
                                       const char* op = "all_gather_into_tensor_out");
// Fills outs[r] with the tensor of rank r; all are contiguous and have the shape and dtype of `input`.
StartedCollective start_all_gather_into_list(at::TensorList outs, const at::Tensor& input,
                                             const GroupPtr& group);
StartedCollective start_reduce_scatter_out(const at::Tensor& input, const c10d::ReduceOp& reduce_op,
                                           const at::Tensor& out, const GroupPtr& group,
                                           const char* op = "reduce_scatter_tensor_out");

// Sends to, or receives from, a group rank. A send's output is an empty tensor of the dtype and device of
// `tensor`; a receive's is `tensor` itself.
StartedCollective start_send(const at::Tensor& tensor, int64_t destination, int64_t tag,
                             const GroupPtr& group);
StartedCollective start_receive(const at::Tensor& tensor, int64_t source, int64_t tag, const GroupPtr& group);

// Starts sends and receives: kinds[i] is "isend" or "irecv", with peers[i], tags[i], tensors[i]. One Work
// covers all if the backend can coalesce them.
StartedCollective start_batch_p2p(const std::vector<std::string>& kinds, at::IntArrayRef peers,
                                  at::IntArrayRef tags, at::TensorList tensors, const GroupPtr& group);

// Returns the outputs as tensors that wait at their first use.
std::vector<at::Tensor> as_pending(StartedCollective start);
at::Tensor as_sole_pending(StartedCollective start);

// Returns the outputs as plain tensors whose Work is in PyTorch's registry until wait_tensor removes it.
std::vector<at::Tensor> as_registered(const StartedCollective& start);

// Tells autograd that tensors of the caller were overwritten: a backward pass that saved them raises.
void note_written(at::TensorList tensors);

// Calls note_written() and as_registered() for a collective that writes into tensors of the caller.
std::vector<at::Tensor> as_overwritten(const StartedCollective& start);

// Returns the outputs as as_pending() does. For each i of `received`, outputs[i] is a buffer of the caller
// into which the backend writes: the pending tensor is an alias of the buffer. The buffer is in PyTorch's
// registry as well, so that waiting for either suffices.
std::vector<at::Tensor> as_received(StartedCollective start, const std::vector<size_t>& received);

// Waits for `tensor`, whether it is pending or its Work is in PyTorch's registry; returns it.
at::Tensor wait_tensor(const at::Tensor& tensor);

}  // namespace funcol
