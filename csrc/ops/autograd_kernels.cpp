// The out-of-place ops above the devices' kernels: at the Autograd keys, and as the decomposition that modes
// ask for.
#include <torch/library.h>

#include <string>

#include "async/layers.h"
#include "ops/autograd.h"
#include "ops/composed.h"
#include "ops/forward_mode.h"
#include "ops/routes.h"
#include "ops/wire.h"

namespace funcol {
namespace {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;
using c10::IValue;
using c10::SymIntArrayRef;
using call::SplitSizes;
using Tensors = std::vector<Tensor>;

// Functions of `arguments`, as run_unrecorded() takes them.
template <typename Recorded, typename Composed, typename Called, typename... Arguments>
auto route(const char* op, TensorList inputs, const Recorded& recorded, const Composed& composed,
           const Called& called, const Arguments&... arguments) {
  check_no_tangents(inputs, op);
  // functorch's transforms take no autograd function written in C++, but know PyTorch's ops.
  if (has_active_transforms()) {
    return composed(arguments...);
  }
  return autograd::needs_gradient(inputs) ? recorded(arguments...)
                                          : run_unrecorded(inputs, composed, called, arguments...);
}

Tensor all_reduce(const Tensor& input, const IValue& reduce_op, const IValue& group) {
  return route("all_reduce", input, autograd::all_reduce, composed::all_reduce, call::all_reduce, input,
               reduce_op, group);
}

Tensors all_reduce_coalesced(TensorList inputs, const IValue& reduce_op, const IValue& group) {
  check_alike(inputs, "all_reduce_coalesced");
  return route("all_reduce_coalesced", inputs, autograd::all_reduce_coalesced, composed::all_reduce_coalesced,
               call::all_reduce_coalesced, inputs, reduce_op, group);
}

Tensor all_gather_into_tensor(const Tensor& input, int64_t group_size, const IValue& group) {
  return route(
      "all_gather_into_tensor", input,
      [&] {
        group_of_size(group, group_size, "all_gather_into_tensor");
        return autograd::all_gather(input, 0, group);
      },
      [&] { return composed::all_gather_into_tensor(input, group_size, group); },
      [&] { return call::all_gather_into_tensor(input, group_size, group); });
}

Tensor all_gather_along_dim(const Tensor& input, int64_t dim, const IValue& group, SplitSizes split_sizes) {
  return route("all_gather_tensor", input, autograd::all_gather, composed::all_gather_along_dim,
               call::all_gather_along_dim, input, dim, group, split_sizes);
}

Tensors all_gather_into_tensor_coalesced(TensorList inputs, int64_t group_size, const IValue& group) {
  check_one_device(inputs, "all_gather_into_tensor_coalesced");
  return route(
      "all_gather_into_tensor_coalesced", inputs,
      [&] {
        group_of_size(group, group_size, "all_gather_into_tensor_coalesced");
        return autograd::all_gather_coalesced(inputs, group);
      },
      [&] { return composed::all_gather_into_tensor_coalesced(inputs, group_size, group); },
      [&] { return call::all_gather_into_tensor_coalesced(inputs, group_size, group); });
}

Tensor reduce_scatter_tensor(const Tensor& input, std::string_view reduce_op, int64_t group_size,
                             const IValue& group) {
  return route(
      "reduce_scatter_tensor", input,
      [&] {
        group_of_size(group, group_size, "reduce_scatter_tensor");
        return autograd::reduce_scatter(input, std::string(reduce_op), 0, group);
      },
      [&] { return composed::reduce_scatter_tensor(input, reduce_op, group_size, group); },
      [&] { return call::reduce_scatter_tensor(input, reduce_op, group_size, group); });
}

Tensor reduce_scatter_along_dim(const Tensor& input, const IValue& reduce_op, int64_t dim,
                                const IValue& group, SplitSizes split_sizes) {
  return route("reduce_scatter_tensor", input, autograd::reduce_scatter, composed::reduce_scatter_along_dim,
               call::reduce_scatter_along_dim, input, reduce_op, dim, group, split_sizes);
}

Tensors reduce_scatter_tensor_coalesced(TensorList inputs, std::string_view reduce_op, int64_t group_size,
                                        const IValue& group) {
  constexpr auto kOp = "reduce_scatter_tensor_coalesced";
  check_alike(inputs, kOp);
  const std::vector<int64_t> dims(inputs.size(), 0);
  return route(
      "reduce_scatter_tensor_coalesced", inputs,
      [&] {
        group_of_size(group, group_size, kOp);
        return autograd::reduce_scatter_coalesced(inputs, std::string(reduce_op), dims, group);
      },
      [&] { return composed::reduce_scatter_tensor_coalesced(inputs, reduce_op, group_size, group); },
      [&] { return call::reduce_scatter_tensor_coalesced(inputs, reduce_op, group_size, group); });
}

Tensors reduce_scatter_along_dims_coalesced(TensorList inputs, const IValue& reduce_op, IntArrayRef dims,
                                            const IValue& group) {
  check_alike(inputs, "reduce_scatter_tensor_coalesced");
  return route("reduce_scatter_tensor_coalesced", inputs, autograd::reduce_scatter_coalesced,
               composed::reduce_scatter_along_dims_coalesced, call::reduce_scatter_along_dims_coalesced,
               inputs, reduce_op, dims, group);
}

Tensor all_to_all_single(const Tensor& input, SymIntArrayRef output_splits, SymIntArrayRef input_splits,
                         const IValue& group) {
  return route("all_to_all_single", input, autograd::all_to_all, composed::all_to_all_single,
               call::all_to_all_single, input, output_splits, input_splits, group);
}

Tensor permute_tensor(const Tensor& input, IntArrayRef destinations, const IValue& group) {
  return route("permute_tensor", input, autograd::permute, composed::permute_tensor, call::permute_tensor,
               input, destinations, group);
}

Tensor broadcast(const Tensor& input, int64_t source, const IValue& group) {
  return route("broadcast", input, autograd::broadcast, composed::broadcast, call::broadcast, input, source,
               group);
}

Tensor reduce(const Tensor& input, const IValue& reduce_op, int64_t destination, const IValue& group) {
  return route("reduce", input, autograd::reduce, composed::reduce, call::reduce, input, reduce_op,
               destination, group);
}

Tensor scatter(const Tensor& input, int64_t source, int64_t dim, const IValue& group,
               SplitSizes split_sizes) {
  return route("scatter", input, autograd::scatter, composed::scatter, call::scatter, input, source, dim,
               group, split_sizes);
}

Tensor gather(const Tensor& input, int64_t destination, int64_t dim, const IValue& group,
              SplitSizes split_sizes) {
  return route("gather", input, autograd::gather, composed::gather, call::gather, input, destination, dim,
               group, split_sizes);
}

}  // namespace
}  // namespace funcol

TORCH_LIBRARY_IMPL(funcol, Autograd, m) {
  m.impl("all_reduce", funcol::all_reduce);
  m.impl("all_reduce_coalesced", funcol::all_reduce_coalesced);
  m.impl("all_gather_into_tensor", funcol::all_gather_into_tensor);
  m.impl("all_gather_along_dim", funcol::all_gather_along_dim);
  m.impl("all_gather_into_tensor_coalesced", funcol::all_gather_into_tensor_coalesced);
  m.impl("reduce_scatter_tensor", funcol::reduce_scatter_tensor);
  m.impl("reduce_scatter_along_dim", funcol::reduce_scatter_along_dim);
  m.impl("reduce_scatter_tensor_coalesced", funcol::reduce_scatter_tensor_coalesced);
  m.impl("reduce_scatter_along_dims_coalesced", funcol::reduce_scatter_along_dims_coalesced);
  m.impl("all_to_all_single", funcol::all_to_all_single);
  m.impl("permute_tensor", funcol::permute_tensor);
  m.impl("broadcast", funcol::broadcast);
  m.impl("reduce", funcol::reduce);
  m.impl("scatter", funcol::scatter);
  m.impl("gather", funcol::gather);
}

TORCH_LIBRARY_IMPL(funcol, CompositeImplicitAutograd, m) {
  m.impl("all_reduce", funcol::composed::all_reduce);
  m.impl("all_reduce_coalesced", funcol::composed::all_reduce_coalesced);
  m.impl("all_gather_into_tensor", funcol::composed::all_gather_into_tensor);
  m.impl("all_gather_along_dim", funcol::composed::all_gather_along_dim);
  m.impl("all_gather_into_tensor_coalesced", funcol::composed::all_gather_into_tensor_coalesced);
  m.impl("reduce_scatter_tensor", funcol::composed::reduce_scatter_tensor);
  m.impl("reduce_scatter_along_dim", funcol::composed::reduce_scatter_along_dim);
  m.impl("reduce_scatter_tensor_coalesced", funcol::composed::reduce_scatter_tensor_coalesced);
  m.impl("reduce_scatter_along_dims_coalesced", funcol::composed::reduce_scatter_along_dims_coalesced);
  m.impl("all_to_all_single", funcol::composed::all_to_all_single);
  m.impl("permute_tensor", funcol::composed::permute_tensor);
  m.impl("broadcast", funcol::composed::broadcast);
  m.impl("reduce", funcol::composed::reduce);
  m.impl("scatter", funcol::composed::scatter);
  m.impl("gather", funcol::composed::gather);
}
