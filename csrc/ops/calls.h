// The out-of-place collectives as C++ functions, called through PyTorch's dispatcher:
//
//   at::Tensor sum = call::all_reduce(x, "sum", group);
//
// Arguments are those of the schema: a group is a name or a ProcessGroup, a reduce op a name or a ReduceOp,
// split_sizes one size per rank or nothing for equal shares. Each is defined in the file of its collective;
// collective.h has the other functions of the objects.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/SymIntArrayRef.h>

#include <string_view>
#include <vector>

#include "ops/collective.h"

namespace funcol::call {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;
using c10::IValue;
using c10::SymIntArrayRef;
using Splits = at::OptionalSymIntArrayRef;
using Tensors = std::vector<Tensor>;

// input, reduce_op, group
extern const Collective<Tensor(const Tensor&, const IValue&, const IValue&)> all_reduce;
extern const Collective<Tensors(TensorList, const IValue&, const IValue&)> all_reduce_coalesced;
// input, group_size, group
extern const Collective<Tensor(const Tensor&, int64_t, const IValue&)> all_gather_into_tensor;
extern const Collective<Tensors(TensorList, int64_t, const IValue&)> all_gather_into_tensor_coalesced;
// input, dim, group, split_sizes
extern const Collective<Tensor(const Tensor&, int64_t, const IValue&, Splits)> all_gather_along_dim;
// input, reduce_op, group_size, group
extern const Collective<Tensor(const Tensor&, std::string_view, int64_t, const IValue&)>
    reduce_scatter_tensor;
extern const Collective<Tensors(TensorList, std::string_view, int64_t, const IValue&)>
    reduce_scatter_tensor_coalesced;
// input, reduce_op, dim, group, split_sizes
extern const Collective<Tensor(const Tensor&, const IValue&, int64_t, const IValue&, Splits)>
    reduce_scatter_along_dim;
// inputs, reduce_op, a dim for each, group
extern const Collective<Tensors(TensorList, const IValue&, IntArrayRef, const IValue&)>
    reduce_scatter_along_dims_coalesced;
// input, output_split_sizes, input_split_sizes, group
extern const Collective<Tensor(const Tensor&, SymIntArrayRef, SymIntArrayRef, const IValue&)>
    all_to_all_single;
// a tensor for each rank, output_split_sizes, group
extern const Collective<Tensors(TensorList, SymIntArrayRef, const IValue&)> all_to_all;
// input, the destination of each rank, group
extern const Collective<Tensor(const Tensor&, IntArrayRef, const IValue&)> permute_tensor;
// input, source, group
extern const Collective<Tensor(const Tensor&, int64_t, const IValue&)> broadcast;
// input, reduce_op, destination, group
extern const Collective<Tensor(const Tensor&, const IValue&, int64_t, const IValue&)> reduce;
// input, source or destination, dim, group, split_sizes
extern const Collective<Tensor(const Tensor&, int64_t, int64_t, const IValue&, Splits)> scatter;
extern const Collective<Tensor(const Tensor&, int64_t, int64_t, const IValue&, Splits)> gather;

}  // namespace funcol::call
