// The funcol ops, called through the dispatcher: whatever the tensors are (eager, meta, fake, functional, a
// subclass), whoever watches, and whether or not they need a gradient.
//
// Arguments are those of the schemas: a group is a name or a ProcessGroup, a reduce op a name or a ReduceOp,
// split_sizes one size per rank or nothing for equal shares.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/SymIntArrayRef.h>

#include <string_view>
#include <vector>

namespace funcol::call {

using c10::IValue;
using SplitSizes = at::OptionalSymIntArrayRef;

at::Tensor all_reduce(const at::Tensor& input, const IValue& reduce_op, const IValue& group);
std::vector<at::Tensor> all_reduce_coalesced(at::TensorList inputs, const IValue& reduce_op,
                                             const IValue& group);
at::Tensor all_gather_into_tensor(const at::Tensor& input, int64_t group_size, const IValue& group);
at::Tensor all_gather_along_dim(const at::Tensor& input, int64_t dim, const IValue& group,
                                SplitSizes split_sizes = {});
std::vector<at::Tensor> all_gather_into_tensor_coalesced(at::TensorList inputs, int64_t group_size,
                                                         const IValue& group);
at::Tensor reduce_scatter_tensor(const at::Tensor& input, std::string_view reduce_op, int64_t group_size,
                                 const IValue& group);
at::Tensor reduce_scatter_along_dim(const at::Tensor& input, const IValue& reduce_op, int64_t dim,
                                    const IValue& group, SplitSizes split_sizes = {});
std::vector<at::Tensor> reduce_scatter_tensor_coalesced(at::TensorList inputs, std::string_view reduce_op,
                                                        int64_t group_size, const IValue& group);
std::vector<at::Tensor> reduce_scatter_along_dims_coalesced(at::TensorList inputs, const IValue& reduce_op,
                                                            at::IntArrayRef dims, const IValue& group);
at::Tensor all_to_all_single(const at::Tensor& input, c10::SymIntArrayRef output_splits,
                             c10::SymIntArrayRef input_splits, const IValue& group);
at::Tensor permute_tensor(const at::Tensor& input, at::IntArrayRef destinations, const IValue& group);
at::Tensor broadcast(const at::Tensor& input, int64_t source, const IValue& group);
at::Tensor reduce(const at::Tensor& input, const IValue& reduce_op, int64_t destination, const IValue& group);
at::Tensor scatter(const at::Tensor& input, int64_t source, int64_t dim, const IValue& group,
                   SplitSizes split_sizes = {});
at::Tensor gather(const at::Tensor& input, int64_t destination, int64_t dim, const IValue& group,
                  SplitSizes split_sizes = {});

}  // namespace funcol::call
