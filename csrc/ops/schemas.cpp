#include "ops/schemas.h"

#include <torch/library.h>

#include <vector>

namespace funcol {

// Defines the operators. A group is a name or a ProcessGroup, a reduce op a name or a ReduceOp.
void define_operators() {
  static const auto library = [] {
    torch::Library m(torch::Library::FRAGMENT, "funcol", std::nullopt, __FILE__, __LINE__);
    const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
    const std::vector<at::Tag> contiguous{at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides};
    const std::vector<at::Tag> random{at::Tag::pt2_compliant_tag, at::Tag::nondeterministic_seeded};

    // Reduces the tensors of all ranks, on every rank.
    m.def("all_reduce(Tensor input, Any reduce_op, Any group_name) -> Tensor", tags);
    // Reduces each tensor of a list by one collective.
    m.def("all_reduce_coalesced(Tensor[] inputs, Any reduce_op, Any group_name) -> Tensor[]", tags);
    // Writes into the inputs.
    m.def("all_reduce_(Tensor(a!) input, Any reduce_op, Any group_name) -> Tensor(a!)", tags);
    m.def("all_reduce_coalesced_(Tensor[](a!) inputs, Any reduce_op, Any group_name) -> Tensor[](a!)", tags);

    // Stacks the tensors of all ranks along dim 0.
    m.def("all_gather_into_tensor(Tensor input, int group_size, Any group_name) -> Tensor", contiguous);
    m.def("all_gather_into_tensor_coalesced(Tensor[] inputs, int group_size, Any group_name) -> Tensor[]",
          contiguous);
    m.def(
        "all_gather_into_tensor_out(Tensor input, int group_size, Any group_name, *, Tensor(a!) out) -> "
        "Tensor(a!)",
        contiguous);
    // Concatenates the tensors of all ranks along any dim, of which they may have different sizes.
    m.def("all_gather_along_dim(Tensor input, int dim, Any group_name, SymInt[]? split_sizes=None) -> Tensor",
          tags);

    // Reduces the tensors of all ranks, and gives each rank its rows.
    m.def("reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, Any group_name) -> Tensor",
          contiguous);
    m.def(
        "reduce_scatter_tensor_coalesced(Tensor[] inputs, str reduce_op, int group_size, Any group_name) -> "
        "Tensor[]",
        contiguous);
    m.def(
        "reduce_scatter_tensor_out(Tensor input, str reduce_op, int group_size, Any group_name, *, "
        "Tensor(a!) out) -> Tensor(a!)",
        contiguous);
    // Gives each rank its part along any dim.
    m.def(
        "reduce_scatter_along_dim(Tensor input, Any reduce_op, int dim, Any group_name, SymInt[]? "
        "split_sizes=None) -> Tensor",
        tags);
    m.def(
        "reduce_scatter_along_dims_coalesced(Tensor[] inputs, Any reduce_op, int[] dims, Any group_name) -> "
        "Tensor[]",
        tags);

    // Sends each rank its rows, and concatenates the received rows.
    m.def(
        "all_to_all_single(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, Any "
        "group_name) -> Tensor",
        contiguous);
    // Sends each rank a tensor of a list.
    m.def("all_to_all(Tensor[] inputs, SymInt[] output_split_sizes, Any group_name) -> Tensor[]", tags);
    // Sends the tensor of rank i to rank src_dst[i].
    m.def("permute_tensor(Tensor input, int[] src_dst, Any group_name) -> Tensor", tags);

    // Gives every rank the tensor of rank `src`, in new memory or into the input.
    m.def("broadcast(Tensor input, int src, Any group_name) -> Tensor", tags);
    m.def("broadcast_(Tensor(a!) input, int src, Any group_name) -> Tensor(a!)", tags);
    // Reduces the tensors of all ranks, on rank `dst`.
    m.def("reduce(Tensor input, Any reduce_op, int dst, Any group_name) -> Tensor", tags);
    // Gives each rank its part of the tensor of rank `src`.
    m.def("scatter(Tensor input, int src, int dim, Any group_name, SymInt[]? split_sizes=None) -> Tensor",
          tags);
    // Concatenates the tensors of all ranks, on rank `dst`.
    m.def("gather(Tensor input, int dst, int dim, Any group_name, SymInt[]? split_sizes=None) -> Tensor",
          tags);

    // Sends to one rank, receives from one, or does several of both at once.
    m.def("isend(Tensor tensor, int dst, int tag, str group_name) -> Tensor", tags);
    m.def("irecv(Tensor tensor, int src, int tag, str group_name) -> Tensor", tags);
    m.def(
        "batch_p2p_ops(str[] op_list, int[] peer_list, int[] tag_list, Tensor[] tensors, str group_name) -> "
        "Tensor[]",
        tags);

    // Waits for the collective that fills a tensor.
    m.def("wait_tensor(Tensor tensor) -> Tensor", tags);
    m.def("wait_tensors(Tensor[] tensors) -> Tensor[]", tags);

    // Fills this rank's shard with random numbers of the full tensor.
    m.def(
        "draw(Tensor like, str distribution, Scalar[] numbers, SymInt[] shape, int[] cuts, *, Generator? "
        "generator=None) -> Tensor",
        random);
    m.def(
        "draw_(Tensor(a!) self, str distribution, Scalar[] numbers, SymInt[] shape, int[] cuts, *, "
        "Generator? generator=None) -> ()",
        random);
    return m;
  }();
}

}  // namespace funcol
