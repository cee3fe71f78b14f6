#include "ops/composed.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <string>

#include "comm/process_group.h"
#include "comm/reduce_op.h"
#include "ops/exchange.h"
#include "ops/part_sizes.h"
#include "ops/wire.h"

namespace funcol::composed {
namespace {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;
using c10::SymInt;
using c10::SymIntArrayRef;
using Tensors = std::vector<Tensor>;

Tensors wait_for_each(const IValue& results) {
  Tensors waited;
  for (const Tensor& tensor : results.toTensorVector()) {
    waited.push_back(wait_tensor(tensor));
  }
  return waited;
}

SymSizes zeros_but(int64_t rank, const SymInt& size, int64_t num_ranks) {
  SymSizes splits(num_ranks, SymInt(0));
  splits[rank] = size;
  return splits;
}

SymInt largest(const SymSizes& sizes) {
  SymInt max = sizes[0];
  for (const auto& size : sizes) {
    max = max.max(size);
  }
  return max;
}

// The parts of `tensor` along `dim`.
Tensors cut(const Tensor& tensor, SymIntArrayRef sizes, int64_t dim) {
  return tensor.split_with_sizes_symint(sizes, dim);
}

// The tensor padded with zeros at the end of `dim` to `size`.
Tensor pad_to(const Tensor& tensor, int64_t dim, const SymInt& size) {
  SymSizes padding(2 * (tensor.dim() - dim), SymInt(0));
  padding.back() = size - tensor.sym_size(dim);
  return at::constant_pad_nd_symint(tensor, padding);
}

// dim 0 of an equal all_gather.
Tensor gather_rows(const Tensor& input, int64_t num_ranks, const IValue& group) {
  return all_gather_into_tensor(input.contiguous(), num_ranks, group);
}

// An exchange of whole tensors or parts of them, flattened: output_numels[r] elements come from rank r.
Tensor exchange_flat(const Tensor& flat, const SymSizes& output_numels, const SymSizes& input_numels,
                     const IValue& group) {
  return all_to_all_single(flat.contiguous(), output_numels, input_numels, group);
}

}  // namespace

IValue as_name(const IValue& value, const std::string& argument, const char* op) {
  if (value.isString()) {
    return value;
  }
  if (argument == "group_name") {
    return group_from_ivalue(value, op)->getGroupName();
  }
  if (argument == "reduce_op") {
    const auto reduce_op = reduce_op_from_ivalue(value, op);
    TORCH_CHECK_NOT_IMPLEMENTED(reduce_op.op_ != c10d::ReduceOp::PREMUL_SUM, "funcol::", op,
                                ": premul_sum cannot be traced. Multiply first, then use sum.");
    return std::string(reduce_op_name(reduce_op));
  }
  return value;
}

IValue core_call(const char* name, std::vector<IValue> arguments) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow((std::string("_c10d_functional::") + name).c_str(), "");
  for (size_t i = 0; i < arguments.size(); ++i) {
    arguments[i] = as_name(arguments[i], op.schema().arguments()[i].name(), name);
  }
  op.callBoxed(&arguments);
  return std::move(arguments.back());
}

Tensor wait_tensor(const Tensor& tensor) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                             .typed<Tensor(const Tensor&)>();
  return op.call(tensor);
}

Tensor all_reduce(const Tensor& input, const IValue& reduce_op, const IValue& group) {
  return wait_tensor(core_call("all_reduce", {input, reduce_op, group}).toTensor());
}

Tensors all_reduce_coalesced(TensorList inputs, const IValue& reduce_op, const IValue& group) {
  return wait_for_each(core_call("all_reduce_coalesced", {inputs, reduce_op, group}));
}

Tensor all_gather_into_tensor(const Tensor& input, int64_t group_size, const IValue& group) {
  return wait_tensor(core_call("all_gather_into_tensor", {input, group_size, group}).toTensor());
}

Tensor all_gather_along_dim(const Tensor& input, int64_t dim, const IValue& group, SplitSizes split_sizes) {
  constexpr auto kOp = "all_gather_tensor";
  const auto resolved = group_from_ivalue(group, kOp);
  const auto num_ranks = resolved->getSize();
  dim = wrap_dim(dim, input, kOp);
  if (!split_sizes.has_value()) {
    const auto gathered = gather_rows(input, num_ranks, group);
    return dim == 0 ? gathered : at::cat(gathered.chunk(num_ranks, 0), dim);
  }
  check_has_dims(input, kOp);
  const auto sizes = sizes_of_shards(input.sym_size(dim), dim, split_sizes, *resolved, kOp);
  const auto padded = pad_to(input, dim, largest(sizes));
  auto shards = gather_rows(padded, num_ranks, group).chunk(num_ranks, 0);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    shards[rank] = shards[rank].narrow_symint(dim, SymInt(0), sizes[rank]);
  }
  return at::cat(shards, dim);
}

Tensors all_gather_into_tensor_coalesced(TensorList inputs, int64_t group_size, const IValue& group) {
  return wait_for_each(core_call("all_gather_into_tensor_coalesced", {inputs, group_size, group}));
}

Tensor reduce_scatter_tensor(const Tensor& input, std::string_view reduce_op, int64_t group_size,
                             const IValue& group) {
  return wait_tensor(
      core_call("reduce_scatter_tensor", {input, std::string(reduce_op), group_size, group}).toTensor());
}

Tensor reduce_scatter_along_dim(const Tensor& input, const IValue& reduce_op, int64_t dim,
                                const IValue& group, SplitSizes split_sizes) {
  constexpr auto kOp = "reduce_scatter_tensor";
  const auto resolved = group_from_ivalue(group, kOp);
  const auto num_ranks = resolved->getSize();
  const auto name = as_name(reduce_op, "reduce_op", kOp);
  reduce_op_from_ivalue(reduce_op, kOp);
  check_has_dims(input, kOp);
  dim = wrap_dim(dim, input, kOp);
  const auto sizes = sizes_of_parts(input.sym_size(dim), dim, split_sizes, *resolved, kOp);
  if (!split_sizes.has_value()) {
    const auto rows = dim == 0 ? input : at::cat(cut(input, sizes, dim));
    return reduce_scatter_tensor(rows.contiguous(), name.toStringView(), num_ranks, group);
  }
  auto parts = cut(input, sizes, dim);
  SymSizes numels;
  for (auto& part : parts) {
    part = part.flatten();
    numels.push_back(part.sym_numel());
  }
  const auto numel = largest(numels);
  for (auto& part : parts) {
    part = pad_to(part, 0, numel);
  }
  const auto received = reduce_scatter_tensor(at::cat(parts), name.toStringView(), num_ranks, group);
  const auto rank = resolved->getRank();
  auto shape = input.sym_sizes().vec();
  shape[dim] = sizes[rank];
  return received.narrow_symint(0, SymInt(0), numels[rank]).view_symint(shape);
}

Tensors reduce_scatter_tensor_coalesced(TensorList inputs, std::string_view reduce_op, int64_t group_size,
                                        const IValue& group) {
  return wait_for_each(
      core_call("reduce_scatter_tensor_coalesced", {inputs, std::string(reduce_op), group_size, group}));
}

Tensors reduce_scatter_along_dims_coalesced(TensorList inputs, const IValue& reduce_op, IntArrayRef dims,
                                            const IValue& group) {
  constexpr auto kOp = "reduce_scatter_tensor_coalesced";
  const auto resolved = group_from_ivalue(group, kOp);
  const auto num_ranks = resolved->getSize();
  const auto name = as_name(reduce_op, "reduce_op", kOp);
  reduce_op_from_ivalue(reduce_op, kOp);
  check_dim_per_tensor(inputs, dims, kOp);
  Tensors rows;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_has_dims(inputs[i], kOp);
    const auto dim = wrap_dim(dims[i], inputs[i], kOp);
    const auto sizes = sizes_of_parts(inputs[i].sym_size(dim), dim, {}, *resolved, kOp);
    rows.push_back(dim == 0 ? inputs[i].contiguous() : at::cat(cut(inputs[i], sizes, dim)));
  }
  return reduce_scatter_tensor_coalesced(rows, name.toStringView(), num_ranks, group);
}

Tensor all_to_all_single(const Tensor& input, SymIntArrayRef output_splits, SymIntArrayRef input_splits,
                         const IValue& group) {
  if (input.is_complex()) {  // moved as pairs of reals, since not every backend knows complex numbers
    return at::view_as_complex(
        all_to_all_single(at::view_as_real(input.resolve_conj()), output_splits, input_splits, group));
  }
  return wait_tensor(core_call("all_to_all_single", {input, output_splits, input_splits, group}).toTensor());
}

Tensor permute_tensor(const Tensor& input, IntArrayRef destinations, const IValue& group) {
  const PermuteSplits splits(destinations, *group_from_ivalue(group, "permute_tensor"));
  const auto numels = [&](const std::vector<int64_t>& num_tensors) {
    SymSizes numels;
    for (const auto count : num_tensors) {
      numels.push_back(count == 0 ? SymInt(0) : input.sym_numel());
    }
    return numels;
  };
  const auto flat = splits.num_sent == 0 ? input.flatten().narrow(0, 0, 0) : input.flatten();
  const auto out = exchange_flat(flat, numels(splits.received), numels(splits.sent), group);
  if (splits.num_received == 1) {
    return out.view_symint(input.sym_sizes());
  }
  auto shape = input.dim() == 0 ? SymSizes{SymInt(1)} : input.sym_sizes().vec();
  shape[0] = shape[0] * SymInt(splits.num_received);
  return out.view_symint(shape);
}

Tensor broadcast(const Tensor& input, int64_t source, const IValue& group) {
  return wait_tensor(core_call("broadcast", {input, source, group}).toTensor());
}

Tensor reduce(const Tensor& input, const IValue& reduce_op, int64_t destination, const IValue& group) {
  const auto resolved = group_from_ivalue(group, "reduce");
  check_rank(destination, *resolved, "dst", "reduce");
  reduce_op_from_ivalue(reduce_op, "reduce");
  const auto reduced = all_reduce(input, reduce_op, group);
  return resolved->getRank() == destination ? reduced : at::zeros_like(reduced);
}

Tensor scatter(const Tensor& input, int64_t source, int64_t dim, const IValue& group,
               SplitSizes split_sizes) {
  constexpr auto kOp = "scatter";
  const auto resolved = group_from_ivalue(group, kOp);
  check_has_dims(input, kOp);
  check_rank(source, *resolved, "src", kOp);
  dim = wrap_dim(dim, input, kOp);
  const auto rank = resolved->getRank();
  const auto num_ranks = resolved->getSize();
  const auto sizes = sizes_of_parts(input.sym_size(dim), dim, split_sizes, *resolved, kOp);
  SymSizes sent(num_ranks, SymInt(0));
  Tensors flat_parts;
  for (const auto& part : cut(input, sizes, dim)) {
    flat_parts.push_back(part.flatten());
  }
  auto shape = input.sym_sizes().vec();
  shape[dim] = sizes[rank];
  const auto own_numel = flat_parts[rank].sym_numel();
  auto flat = at::cat(flat_parts);
  if (rank == source) {
    for (int64_t r = 0; r < num_ranks; ++r) {
      sent[r] = flat_parts[r].sym_numel();
    }
  } else {
    flat = flat.narrow(0, 0, 0);
  }
  return exchange_flat(flat, zeros_but(source, own_numel, num_ranks), sent, group).view_symint(shape);
}

Tensor gather(const Tensor& input, int64_t destination, int64_t dim, const IValue& group,
              SplitSizes split_sizes) {
  constexpr auto kOp = "gather";
  const auto resolved = group_from_ivalue(group, kOp);
  check_has_dims(input, kOp);
  check_rank(destination, *resolved, "dst", kOp);
  dim = wrap_dim(dim, input, kOp);
  const auto num_ranks = resolved->getSize();
  const auto sizes = sizes_of_shards(input.sym_size(dim), dim, split_sizes, *resolved, kOp);
  auto shape = input.sym_sizes().vec();
  SymInt numel_per_slice(1);
  for (int64_t i = 0; i < input.dim(); ++i) {
    numel_per_slice = i == dim ? numel_per_slice : numel_per_slice * shape[i];
  }
  SymSizes received(num_ranks, SymInt(0));
  if (resolved->getRank() == destination) {
    for (int64_t r = 0; r < num_ranks; ++r) {
      received[r] = sizes[r] * numel_per_slice;
    }
  }
  const auto flat =
      exchange_flat(input.flatten(), received, zeros_but(destination, input.sym_numel(), num_ranks), group);
  if (resolved->getRank() != destination) {
    shape[dim] = SymInt(0);
    return flat.view_symint(shape);
  }
  auto parts = cut(flat, received, 0);
  for (int64_t r = 0; r < num_ranks; ++r) {
    shape[dim] = sizes[r];
    parts[r] = parts[r].view_symint(shape);
  }
  return at::cat(parts, dim);
}

}  // namespace funcol::composed
