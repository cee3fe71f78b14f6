// The collectives composed of PyTorch's _c10d_functional ops, wait_tensor and ATen ops: what layers see.
//
// Compilers, exporters and debug modes know those ops and their meaning. Nothing here runs a collective of
// its own, and no pending tensors are made. Arguments as in calls.h.
#pragma once

#include "ops/calls.h"

namespace funcol::composed {

using c10::IValue;
using call::SplitSizes;

// Calls _c10d_functional::<name> with `arguments`; groups and reduce ops are turned into names, as all minors
// take them and graphs can hold them.
IValue core_call(const char* name, std::vector<IValue> arguments);

// `value`, the argument of this name, as core_call() passes it on.
IValue as_name(const IValue& value, const std::string& argument, const char* op);

at::Tensor wait_tensor(const at::Tensor& tensor);

at::Tensor all_reduce(const at::Tensor& input, const IValue& reduce_op, const IValue& group);
std::vector<at::Tensor> all_reduce_coalesced(at::TensorList inputs, const IValue& reduce_op,
                                             const IValue& group);
at::Tensor all_gather_into_tensor(const at::Tensor& input, int64_t group_size, const IValue& group);
at::Tensor all_gather_along_dim(const at::Tensor& input, int64_t dim, const IValue& group,
                                SplitSizes split_sizes);
std::vector<at::Tensor> all_gather_into_tensor_coalesced(at::TensorList inputs, int64_t group_size,
                                                         const IValue& group);
at::Tensor reduce_scatter_tensor(const at::Tensor& input, std::string_view reduce_op, int64_t group_size,
                                 const IValue& group);
at::Tensor reduce_scatter_along_dim(const at::Tensor& input, const IValue& reduce_op, int64_t dim,
                                    const IValue& group, SplitSizes split_sizes);
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
                   SplitSizes split_sizes);
at::Tensor gather(const at::Tensor& input, int64_t destination, int64_t dim, const IValue& group,
                  SplitSizes split_sizes);

}  // namespace funcol::composed
