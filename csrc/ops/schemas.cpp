// Every funcol op. Kernels register where they are written: kernels.cpp (CPU, CUDA and any other device
// with a c10d backend), meta.cpp (shapes), autograd.cpp (gradients), tracing.cpp (what modes see).
//
// Most schemas are those of PyTorch's _c10d_functional, as the newest supported minor has them: a group is
// a name or a ProcessGroup, a reduce op a name or a ReduceOp.
#include <torch/library.h>

TORCH_LIBRARY(funcol, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  const std::vector<at::Tag> contiguous{at::Tag::pt2_compliant_tag, at::Tag::needs_contiguous_strides};

  m.def("all_reduce(Tensor input, Any reduce_op, Any group_name) -> Tensor", tags);
  m.def("all_reduce_(Tensor(a!) input, Any reduce_op, Any group_name) -> Tensor(a!)", tags);
  m.def("all_reduce_coalesced(Tensor[] inputs, Any reduce_op, Any group_name) -> Tensor[]", tags);
  m.def("all_reduce_coalesced_(Tensor[](a!) inputs, Any reduce_op, Any group_name) -> Tensor[](a!)", tags);

  m.def("all_gather_into_tensor(Tensor input, int group_size, Any group_name) -> Tensor", contiguous);
  m.def(
      "all_gather_into_tensor_out(Tensor input, int group_size, Any group_name, *, Tensor(a!) out) -> "
      "Tensor(a!)",
      contiguous);
  m.def("all_gather_into_tensor_coalesced(Tensor[] inputs, int group_size, Any group_name) -> Tensor[]",
        contiguous);

  m.def("reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, Any group_name) -> Tensor",
        contiguous);
  m.def(
      "reduce_scatter_tensor_out(Tensor input, str reduce_op, int group_size, Any group_name, *, Tensor(a!) "
      "out) -> "
      "Tensor(a!)",
      contiguous);
  m.def(
      "reduce_scatter_tensor_coalesced(Tensor[] inputs, str reduce_op, int group_size, Any group_name) -> "
      "Tensor[]",
      contiguous);

  m.def(
      "all_to_all_single(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, Any "
      "group_name) -> "
      "Tensor",
      contiguous);

  m.def("broadcast(Tensor input, int src, Any group_name) -> Tensor", tags);
  m.def("broadcast_(Tensor(a!) input, int src, Any group_name) -> Tensor(a!)", tags);

  // What PyTorch's set lacks.
  m.def("all_gather_along_dim(Tensor input, int dim, Any group_name, SymInt[]? split_sizes=None) -> Tensor",
        tags);
  m.def(
      "reduce_scatter_along_dim(Tensor input, Any reduce_op, int dim, Any group_name, SymInt[]? "
      "split_sizes=None) -> Tensor",
      tags);
  m.def(
      "reduce_scatter_along_dims_coalesced(Tensor[] inputs, Any reduce_op, int[] dims, Any group_name) -> "
      "Tensor[]",
      tags);
  m.def("permute_tensor(Tensor input, int[] src_dst, Any group_name) -> Tensor", tags);
  m.def("reduce(Tensor input, Any reduce_op, int dst, Any group_name) -> Tensor", tags);
  m.def("scatter(Tensor input, int src, int dim, Any group_name, SymInt[]? split_sizes=None) -> Tensor",
        tags);
  m.def("gather(Tensor input, int dst, int dim, Any group_name, SymInt[]? split_sizes=None) -> Tensor", tags);

  m.def("isend(Tensor tensor, int dst, int tag, str group_name) -> Tensor", tags);
  m.def("irecv(Tensor tensor, int src, int tag, str group_name) -> Tensor", tags);
  m.def(
      "batch_p2p_ops(str[] op_list, int[] peer_list, int[] tag_list, Tensor[] tensors, str group_name) -> "
      "Tensor[]",
      tags);

  m.def("wait_tensor(Tensor tensor) -> Tensor", tags);
  m.def("wait_tensors(Tensor[] tensors) -> Tensor[]", tags);
}
