// Meta kernels: shapes, dtypes and strides of results, symbolic sizes kept.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "comm/process_group.h"
#include "comm/reduce_op.h"
#include "ops/part_sizes.h"
#include "ops/wire.h"

namespace funcol {
namespace {

using c10::IValue;
using c10::SymInt;
using Tensors = std::vector<at::Tensor>;

at::Tensor empty(const at::Tensor& like, const SymSizes& sizes) {
  return at::empty_symint(sizes, like.options());
}

at::Tensor contiguous_like(const at::Tensor& input) {
  return at::empty_like(input, input.options(), at::MemoryFormat::Contiguous);
}

at::Tensor gathered(const at::Tensor& input, int64_t group_size) {
  auto sizes = input.dim() == 0 ? SymSizes{SymInt(1)} : input.sym_sizes().vec();
  sizes[0] = sizes[0] * group_size;
  return empty(input, sizes);
}

at::Tensor scattered(const at::Tensor& input, int64_t group_size) {
  auto sizes = input.sym_sizes().vec();
  sizes.at(0) = sizes[0] / SymInt(group_size);
  return empty(input, sizes);
}

template <typename Shape>
Tensors each(at::TensorList inputs, const Shape& shape) {
  Tensors results;
  results.reserve(inputs.size());
  for (const auto& input : inputs) {
    results.push_back(shape(input));
  }
  return results;
}

at::Tensor all_reduce(const at::Tensor& input, const IValue&, const IValue&) {
  return contiguous_like(input);
}
at::Tensor& all_reduce_(at::Tensor& input, const IValue&, const IValue&) { return input; }
Tensors all_reduce_coalesced(at::TensorList inputs, const IValue&, const IValue&) {
  return each(inputs, contiguous_like);
}
Tensors all_reduce_coalesced_(at::TensorList inputs, const IValue&, const IValue&) { return inputs.vec(); }

at::Tensor all_gather(const at::Tensor& input, int64_t group_size, const IValue&) {
  return gathered(input, group_size);
}
at::Tensor& all_gather_out(const at::Tensor&, int64_t, const IValue&, at::Tensor& out) { return out; }
Tensors all_gather_coalesced(at::TensorList inputs, int64_t group_size, const IValue&) {
  return each(inputs, [&](const at::Tensor& input) { return gathered(input, group_size); });
}

at::Tensor reduce_scatter(const at::Tensor& input, std::string_view, int64_t group_size, const IValue&) {
  return scattered(input, group_size);
}
at::Tensor& reduce_scatter_out(const at::Tensor&, std::string_view, int64_t, const IValue&, at::Tensor& out) {
  return out;
}
Tensors reduce_scatter_coalesced(at::TensorList inputs, std::string_view, int64_t group_size, const IValue&) {
  return each(inputs, [&](const at::Tensor& input) { return scattered(input, group_size); });
}

at::Tensor all_to_all(const at::Tensor& input, c10::SymIntArrayRef output_splits, c10::SymIntArrayRef,
                      const IValue&) {
  auto sizes = input.sym_sizes().vec();
  if (!output_splits.empty()) {
    sizes.at(0) = SymInt(0);
    for (const auto& size : output_splits) {
      sizes[0] = sizes[0] + size;
    }
  }
  return empty(input, sizes);
}

at::Tensor broadcast(const at::Tensor& input, int64_t, const IValue&) { return contiguous_like(input); }
at::Tensor& broadcast_(at::Tensor& input, int64_t, const IValue&) { return input; }

// Sizes that depend on the number of ranks, or on which one this is, come from the group.
at::Tensor all_gather_along_dim(const at::Tensor& input, int64_t dim, const IValue& group,
                                at::OptionalSymIntArrayRef split_sizes) {
  constexpr auto kOp = "all_gather_tensor";
  dim = wrap_dim(dim, input, kOp);
  if (split_sizes.has_value()) {
    check_has_dims(input, kOp);
  }
  auto sizes = input.dim() == 0 ? SymSizes{SymInt(1)} : input.sym_sizes().vec();
  sizes[dim] = sum(sizes_of_shards(sizes[dim], dim, split_sizes, *group_from_ivalue(group, kOp), kOp));
  return empty(input, sizes);
}

at::Tensor own_part(const at::Tensor& input, int64_t dim, const c10d::ProcessGroup& group,
                    at::OptionalSymIntArrayRef split_sizes, const char* op) {
  check_has_dims(input, op);
  dim = wrap_dim(dim, input, op);
  auto sizes = input.sym_sizes().vec();
  sizes[dim] = sizes_of_parts(sizes[dim], dim, split_sizes, group, op)[group.getRank()];
  return empty(input, sizes);
}

at::Tensor reduce_scatter_along_dim(const at::Tensor& input, const IValue& reduce_op, int64_t dim,
                                    const IValue& group, at::OptionalSymIntArrayRef split_sizes) {
  constexpr auto kOp = "reduce_scatter_tensor";
  reduce_op_from_ivalue(reduce_op, kOp);
  return own_part(input, dim, *group_from_ivalue(group, kOp), split_sizes, kOp);
}

Tensors reduce_scatter_along_dims_coalesced(at::TensorList inputs, const IValue& reduce_op,
                                            at::IntArrayRef dims, const IValue& group) {
  constexpr auto kOp = "reduce_scatter_tensor_coalesced";
  reduce_op_from_ivalue(reduce_op, kOp);
  check_dim_per_tensor(inputs, dims, kOp);
  const auto resolved = group_from_ivalue(group, kOp);
  Tensors results;
  for (size_t i = 0; i < inputs.size(); ++i) {
    results.push_back(own_part(inputs[i], dims[i], *resolved, {}, kOp));
  }
  return results;
}

at::Tensor permute_tensor(const at::Tensor& input, at::IntArrayRef destinations, const IValue& group) {
  const auto resolved = group_from_ivalue(group, "permute_tensor");
  check_permute(destinations, *resolved);
  const auto num_received = std::count(destinations.begin(), destinations.end(), resolved->getRank());
  if (num_received == 1) {
    return contiguous_like(input);
  }
  auto sizes = input.dim() == 0 ? SymSizes{SymInt(1)} : input.sym_sizes().vec();
  sizes[0] = sizes[0] * SymInt(num_received);
  return empty(input, sizes);
}

at::Tensor reduce(const at::Tensor& input, const IValue& reduce_op, int64_t destination,
                  const IValue& group) {
  reduce_op_from_ivalue(reduce_op, "reduce");
  check_rank(destination, *group_from_ivalue(group, "reduce"), "dst", "reduce");
  return contiguous_like(input);
}

at::Tensor scatter(const at::Tensor& input, int64_t source, int64_t dim, const IValue& group,
                   at::OptionalSymIntArrayRef split_sizes) {
  const auto resolved = group_from_ivalue(group, "scatter");
  check_rank(source, *resolved, "src", "scatter");
  return own_part(input, dim, *resolved, split_sizes, "scatter");
}

at::Tensor gather(const at::Tensor& input, int64_t destination, int64_t dim, const IValue& group,
                  at::OptionalSymIntArrayRef split_sizes) {
  constexpr auto kOp = "gather";
  const auto resolved = group_from_ivalue(group, kOp);
  check_has_dims(input, kOp);
  check_rank(destination, *resolved, "dst", kOp);
  dim = wrap_dim(dim, input, kOp);
  auto sizes = input.sym_sizes().vec();
  const auto whole = sum(sizes_of_shards(sizes[dim], dim, split_sizes, *resolved, kOp));
  sizes[dim] = resolved->getRank() == destination ? whole : SymInt(0);
  return empty(input, sizes);
}

at::Tensor isend(const at::Tensor& tensor, int64_t, int64_t, std::string_view) {
  return empty(tensor, {SymInt(0)});
}
at::Tensor irecv(const at::Tensor& tensor, int64_t, int64_t, std::string_view) {
  return at::empty_like(tensor);
}
Tensors batch_p2p_ops(const std::vector<std::string>& kinds, at::IntArrayRef, at::IntArrayRef,
                      at::TensorList tensors, std::string_view) {
  Tensors results;
  for (size_t i = 0; i < tensors.size(); ++i) {
    results.push_back(kinds.at(i) == "irecv" ? at::empty_like(tensors[i]) : empty(tensors[i], {SymInt(0)}));
  }
  return results;
}

at::Tensor wait_tensor(const at::Tensor& tensor) { return at::empty_like(tensor); }
Tensors wait_tensors(at::TensorList tensors) {
  return each(tensors, [](const at::Tensor& tensor) { return at::empty_like(tensor); });
}

}  // namespace
}  // namespace funcol

TORCH_LIBRARY_IMPL(funcol, Meta, m) {
  m.impl("all_reduce", funcol::all_reduce);
  m.impl("all_reduce_", funcol::all_reduce_);
  m.impl("all_reduce_coalesced", funcol::all_reduce_coalesced);
  m.impl("all_reduce_coalesced_", funcol::all_reduce_coalesced_);
  m.impl("all_gather_into_tensor", funcol::all_gather);
  m.impl("all_gather_into_tensor_out", funcol::all_gather_out);
  m.impl("all_gather_into_tensor_coalesced", funcol::all_gather_coalesced);
  m.impl("reduce_scatter_tensor", funcol::reduce_scatter);
  m.impl("reduce_scatter_tensor_out", funcol::reduce_scatter_out);
  m.impl("reduce_scatter_tensor_coalesced", funcol::reduce_scatter_coalesced);
  m.impl("all_to_all_single", funcol::all_to_all);
  m.impl("broadcast", funcol::broadcast);
  m.impl("broadcast_", funcol::broadcast_);
  m.impl("all_gather_along_dim", funcol::all_gather_along_dim);
  m.impl("reduce_scatter_along_dim", funcol::reduce_scatter_along_dim);
  m.impl("reduce_scatter_along_dims_coalesced", funcol::reduce_scatter_along_dims_coalesced);
  m.impl("permute_tensor", funcol::permute_tensor);
  m.impl("reduce", funcol::reduce);
  m.impl("scatter", funcol::scatter);
  m.impl("gather", funcol::gather);
  m.impl("isend", funcol::isend);
  m.impl("irecv", funcol::irecv);
  m.impl("batch_p2p_ops", funcol::batch_p2p_ops);
  m.impl("wait_tensor", funcol::wait_tensor);
  m.impl("wait_tensors", funcol::wait_tensors);
}
