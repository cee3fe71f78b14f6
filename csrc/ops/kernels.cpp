// Kernels of the funcol ops: schema arguments in, tensors out.
//
// Out-of-place ops return pending tensors. In-place and out= forms return the tensor itself, which must
// be waited for with wait_tensor, as in PyTorch. The same kernels serve every device whose tensors a c10d
// backend takes.
#include <ATen/core/List.h>
#include <torch/library.h>

#include <memory>
#include <utility>

#include "async/async_tensor.h"
#include "ops/collectives.h"

namespace funcol {
namespace {

using c10::IValue;
using Tensors = std::vector<at::Tensor>;

at::Tensor all_reduce(const at::Tensor& input, const IValue& reduce_op, const IValue& group) {
  return as_sole_pending(start_all_reduce(input, reduce_op_from_ivalue(reduce_op, "all_reduce"),
                                          group_from_ivalue(group, "all_reduce")));
}

at::Tensor& all_reduce_(at::Tensor& input, const IValue& reduce_op, const IValue& group) {
  as_overwritten(start_all_reduce_(input, reduce_op_from_ivalue(reduce_op, "all_reduce_"),
                                   group_from_ivalue(group, "all_reduce_")));
  return input;
}

Tensors all_reduce_coalesced(at::TensorList inputs, const IValue& reduce_op, const IValue& group) {
  return as_pending(start_all_reduce_coalesced(inputs,
                                               reduce_op_from_ivalue(reduce_op, "all_reduce_coalesced"),
                                               group_from_ivalue(group, "all_reduce_coalesced")));
}

Tensors all_reduce_coalesced_(at::TensorList inputs, const IValue& reduce_op, const IValue& group) {
  return as_overwritten(start_all_reduce_coalesced_(inputs,
                                                    reduce_op_from_ivalue(reduce_op, "all_reduce_coalesced_"),
                                                    group_from_ivalue(group, "all_reduce_coalesced_")));
}

at::Tensor all_gather_into_tensor(const at::Tensor& input, int64_t group_size, const IValue& group) {
  return as_sole_pending(
      start_all_gather(input, 0, group_of_size(group, group_size, "all_gather_into_tensor")));
}

at::Tensor& all_gather_into_tensor_out(const at::Tensor& input, int64_t group_size, const IValue& group,
                                       at::Tensor& out) {
  as_overwritten(
      start_all_gather_out(input, out, group_of_size(group, group_size, "all_gather_into_tensor_out")));
  return out;
}

Tensors all_gather_into_tensor_coalesced(at::TensorList inputs, int64_t group_size, const IValue& group) {
  return as_pending(start_all_gather_coalesced(
      inputs, group_of_size(group, group_size, "all_gather_into_tensor_coalesced")));
}

at::Tensor reduce_scatter_tensor(const at::Tensor& input, std::string_view reduce_op, int64_t group_size,
                                 const IValue& group) {
  constexpr auto kOp = "reduce_scatter_tensor";
  return as_sole_pending(start_reduce_scatter(input, reduce_op_from_name(reduce_op, kOp), 0,
                                              group_of_size(group, group_size, kOp)));
}

at::Tensor& reduce_scatter_tensor_out(const at::Tensor& input, std::string_view reduce_op, int64_t group_size,
                                      const IValue& group, at::Tensor& out) {
  constexpr auto kOp = "reduce_scatter_tensor_out";
  as_overwritten(start_reduce_scatter_out(input, reduce_op_from_name(reduce_op, kOp), out,
                                          group_of_size(group, group_size, kOp)));
  return out;
}

Tensors reduce_scatter_tensor_coalesced(at::TensorList inputs, std::string_view reduce_op, int64_t group_size,
                                        const IValue& group) {
  constexpr auto kOp = "reduce_scatter_tensor_coalesced";
  const std::vector<int64_t> dims(inputs.size(), 0);
  return as_pending(start_reduce_scatter_coalesced(inputs, reduce_op_from_name(reduce_op, kOp), dims,
                                                   group_of_size(group, group_size, kOp)));
}

at::Tensor all_to_all_single(const at::Tensor& input, c10::SymIntArrayRef output_splits,
                             c10::SymIntArrayRef input_splits, const IValue& group) {
  return as_sole_pending(start_all_to_all(input, C10_AS_INTARRAYREF_SLOW(output_splits),
                                          C10_AS_INTARRAYREF_SLOW(input_splits),
                                          group_from_ivalue(group, "all_to_all_single")));
}

// The sizes behind an optional list, which come as symbols even where they are numbers.
class Sizes {
 public:
  explicit Sizes(at::OptionalSymIntArrayRef sizes) : has_value_(sizes.has_value()) {
    if (has_value_) {
      values_ = C10_AS_INTARRAYREF_SLOW(*sizes).vec();
    }
  }
  operator at::OptionalIntArrayRef() const {  // NOLINT(google-explicit-constructor)
    return has_value_ ? at::OptionalIntArrayRef(values_) : at::OptionalIntArrayRef();
  }

 private:
  bool has_value_;
  std::vector<int64_t> values_;
};

at::Tensor all_gather_along_dim(const at::Tensor& input, int64_t dim, const IValue& group,
                                at::OptionalSymIntArrayRef split_sizes) {
  return as_sole_pending(
      start_uneven_all_gather(input, dim, Sizes(split_sizes), group_from_ivalue(group, "all_gather_tensor")));
}

at::Tensor reduce_scatter_along_dim(const at::Tensor& input, const IValue& reduce_op, int64_t dim,
                                    const IValue& group, at::OptionalSymIntArrayRef split_sizes) {
  constexpr auto kOp = "reduce_scatter_tensor";
  return as_sole_pending(start_uneven_reduce_scatter(input, reduce_op_from_ivalue(reduce_op, kOp), dim,
                                                     Sizes(split_sizes), group_from_ivalue(group, kOp)));
}

Tensors reduce_scatter_along_dims_coalesced(at::TensorList inputs, const IValue& reduce_op,
                                            at::IntArrayRef dims, const IValue& group) {
  constexpr auto kOp = "reduce_scatter_tensor_coalesced";
  return as_pending(start_reduce_scatter_coalesced(inputs, reduce_op_from_ivalue(reduce_op, kOp), dims,
                                                   group_from_ivalue(group, kOp)));
}

at::Tensor permute_tensor(const at::Tensor& input, at::IntArrayRef destinations, const IValue& group) {
  return as_sole_pending(start_permute(input, destinations, group_from_ivalue(group, "permute_tensor")));
}

at::Tensor reduce(const at::Tensor& input, const IValue& reduce_op, int64_t destination,
                  const IValue& group) {
  return as_sole_pending(start_reduce(input, reduce_op_from_ivalue(reduce_op, "reduce"), destination,
                                      group_from_ivalue(group, "reduce")));
}

at::Tensor scatter(const at::Tensor& input, int64_t source, int64_t dim, const IValue& group,
                   at::OptionalSymIntArrayRef split_sizes) {
  return as_sole_pending(
      start_scatter(input, source, dim, Sizes(split_sizes), group_from_ivalue(group, "scatter")));
}

at::Tensor gather(const at::Tensor& input, int64_t destination, int64_t dim, const IValue& group,
                  at::OptionalSymIntArrayRef split_sizes) {
  return as_sole_pending(
      start_gather(input, destination, dim, Sizes(split_sizes), group_from_ivalue(group, "gather")));
}

at::Tensor broadcast(const at::Tensor& input, int64_t source, const IValue& group) {
  return as_sole_pending(start_broadcast(input, source, group_from_ivalue(group, "broadcast")));
}

at::Tensor& broadcast_(at::Tensor& input, int64_t source, const IValue& group) {
  as_overwritten(start_broadcast_(input, source, group_from_ivalue(group, "broadcast_")));
  return input;
}

at::Tensor irecv(const at::Tensor& tensor, int64_t source, int64_t tag, std::string_view group) {
  return as_received(start_receive(tensor, source, tag, group_from_name(group, "irecv")), {0})[0];
}

at::Tensor isend(const at::Tensor& tensor, int64_t destination, int64_t tag, std::string_view group) {
  return as_sole_pending(start_send(tensor, destination, tag, group_from_name(group, "isend")));
}

Tensors batch_p2p_ops(const std::vector<std::string>& kinds, at::IntArrayRef peers, at::IntArrayRef tags,
                      at::TensorList tensors, std::string_view group) {
  std::vector<size_t> received;
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] == "irecv") {
      received.push_back(i);
    }
  }
  return as_received(start_batch_p2p(kinds, peers, tags, tensors, group_from_name(group, "batch_p2p_ops")),
                     received);
}

Tensors wait_tensors(at::TensorList tensors) {
  for (const auto& tensor : tensors) {
    wait_tensor(tensor);
  }
  return tensors.vec();
}

void register_kernels(torch::Library& m) {
  m.impl("all_reduce", all_reduce);
  m.impl("all_reduce_", all_reduce_);
  m.impl("all_reduce_coalesced", all_reduce_coalesced);
  m.impl("all_reduce_coalesced_", all_reduce_coalesced_);
  m.impl("all_gather_into_tensor", all_gather_into_tensor);
  m.impl("all_gather_into_tensor_out", all_gather_into_tensor_out);
  m.impl("all_gather_into_tensor_coalesced", all_gather_into_tensor_coalesced);
  m.impl("reduce_scatter_tensor", reduce_scatter_tensor);
  m.impl("reduce_scatter_tensor_out", reduce_scatter_tensor_out);
  m.impl("reduce_scatter_tensor_coalesced", reduce_scatter_tensor_coalesced);
  m.impl("all_to_all_single", all_to_all_single);
  m.impl("broadcast", broadcast);
  m.impl("broadcast_", broadcast_);
  m.impl("all_gather_along_dim", all_gather_along_dim);
  m.impl("reduce_scatter_along_dim", reduce_scatter_along_dim);
  m.impl("reduce_scatter_along_dims_coalesced", reduce_scatter_along_dims_coalesced);
  m.impl("permute_tensor", permute_tensor);
  m.impl("reduce", reduce);
  m.impl("scatter", scatter);
  m.impl("gather", gather);
  m.impl("isend", isend);
  m.impl("irecv", irecv);
  m.impl("batch_p2p_ops", batch_p2p_ops);
  m.impl("wait_tensor", wait_tensor);
  m.impl("wait_tensors", wait_tensors);
}

}  // namespace
}  // namespace funcol

TORCH_LIBRARY_IMPL(funcol, CPU, m) { funcol::register_kernels(m); }
TORCH_LIBRARY_IMPL(funcol, CUDA, m) { funcol::register_kernels(m); }
// Any other device that has a c10d backend.
TORCH_LIBRARY_IMPL(funcol, CompositeExplicitAutograd, m) { funcol::register_kernels(m); }
