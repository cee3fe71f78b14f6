#include "ops/calls.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

#include "async/layers.h"
#include "ops/composed.h"

namespace funcol::call {
namespace {

using at::IntArrayRef;
using at::Tensor;
using at::TensorList;
using c10::SymIntArrayRef;
using Tensors = std::vector<Tensor>;

template <typename Signature>
c10::TypedOperatorHandle<Signature> find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether a layer is at work below autograd, as in DTensor's dispatcher while a compiler traces: the layer
// would see the op itself, which nothing above has decomposed.
bool is_watched(TensorList inputs) {
  const auto& excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return excluded.has(c10::DispatchKey::AutogradFunctionality) && !excluded.has(c10::DispatchKey::Python) &&
         (has_active_layers() || std::ranges::any_of(inputs, belongs_to_layer));
}

}  // namespace

Tensor all_reduce(const Tensor& input, const IValue& reduce_op, const IValue& group) {
  if (is_watched(input)) {
    return composed::all_reduce(input, reduce_op, group);
  }
  static const auto op = find<Tensor(const Tensor&, const IValue&, const IValue&)>("funcol::all_reduce");
  return op.call(input, reduce_op, group);
}

Tensors all_reduce_coalesced(TensorList inputs, const IValue& reduce_op, const IValue& group) {
  if (is_watched(inputs)) {
    return composed::all_reduce_coalesced(inputs, reduce_op, group);
  }
  static const auto op =
      find<Tensors(TensorList, const IValue&, const IValue&)>("funcol::all_reduce_coalesced");
  return op.call(inputs, reduce_op, group);
}

Tensor all_gather_into_tensor(const Tensor& input, int64_t group_size, const IValue& group) {
  if (is_watched(input)) {
    return composed::all_gather_into_tensor(input, group_size, group);
  }
  static const auto op =
      find<Tensor(const Tensor&, int64_t, const IValue&)>("funcol::all_gather_into_tensor");
  return op.call(input, group_size, group);
}

Tensor all_gather_along_dim(const Tensor& input, int64_t dim, const IValue& group, SplitSizes split_sizes) {
  if (is_watched(input)) {
    return composed::all_gather_along_dim(input, dim, group, split_sizes);
  }
  static const auto op =
      find<Tensor(const Tensor&, int64_t, const IValue&, SplitSizes)>("funcol::all_gather_along_dim");
  return op.call(input, dim, group, split_sizes);
}

Tensors all_gather_into_tensor_coalesced(TensorList inputs, int64_t group_size, const IValue& group) {
  if (is_watched(inputs)) {
    return composed::all_gather_into_tensor_coalesced(inputs, group_size, group);
  }
  static const auto op =
      find<Tensors(TensorList, int64_t, const IValue&)>("funcol::all_gather_into_tensor_coalesced");
  return op.call(inputs, group_size, group);
}

Tensor reduce_scatter_tensor(const Tensor& input, std::string_view reduce_op, int64_t group_size,
                             const IValue& group) {
  if (is_watched(input)) {
    return composed::reduce_scatter_tensor(input, reduce_op, group_size, group);
  }
  static const auto op =
      find<Tensor(const Tensor&, std::string_view, int64_t, const IValue&)>("funcol::reduce_scatter_tensor");
  return op.call(input, reduce_op, group_size, group);
}

Tensor reduce_scatter_along_dim(const Tensor& input, const IValue& reduce_op, int64_t dim,
                                const IValue& group, SplitSizes split_sizes) {
  if (is_watched(input)) {
    return composed::reduce_scatter_along_dim(input, reduce_op, dim, group, split_sizes);
  }
  static const auto op = find<Tensor(const Tensor&, const IValue&, int64_t, const IValue&, SplitSizes)>(
      "funcol::reduce_scatter_along_dim");
  return op.call(input, reduce_op, dim, group, split_sizes);
}

Tensors reduce_scatter_tensor_coalesced(TensorList inputs, std::string_view reduce_op, int64_t group_size,
                                        const IValue& group) {
  if (is_watched(inputs)) {
    return composed::reduce_scatter_tensor_coalesced(inputs, reduce_op, group_size, group);
  }
  static const auto op = find<Tensors(TensorList, std::string_view, int64_t, const IValue&)>(
      "funcol::reduce_scatter_tensor_coalesced");
  return op.call(inputs, reduce_op, group_size, group);
}

Tensors reduce_scatter_along_dims_coalesced(TensorList inputs, const IValue& reduce_op, IntArrayRef dims,
                                            const IValue& group) {
  if (is_watched(inputs)) {
    return composed::reduce_scatter_along_dims_coalesced(inputs, reduce_op, dims, group);
  }
  static const auto op = find<Tensors(TensorList, const IValue&, IntArrayRef, const IValue&)>(
      "funcol::reduce_scatter_along_dims_coalesced");
  return op.call(inputs, reduce_op, dims, group);
}

Tensor all_to_all_single(const Tensor& input, SymIntArrayRef output_splits, SymIntArrayRef input_splits,
                         const IValue& group) {
  if (is_watched(input)) {
    return composed::all_to_all_single(input, output_splits, input_splits, group);
  }
  static const auto op =
      find<Tensor(const Tensor&, SymIntArrayRef, SymIntArrayRef, const IValue&)>("funcol::all_to_all_single");
  return op.call(input, output_splits, input_splits, group);
}

Tensor permute_tensor(const Tensor& input, IntArrayRef destinations, const IValue& group) {
  if (is_watched(input)) {
    return composed::permute_tensor(input, destinations, group);
  }
  static const auto op = find<Tensor(const Tensor&, IntArrayRef, const IValue&)>("funcol::permute_tensor");
  return op.call(input, destinations, group);
}

Tensor broadcast(const Tensor& input, int64_t source, const IValue& group) {
  if (is_watched(input)) {
    return composed::broadcast(input, source, group);
  }
  static const auto op = find<Tensor(const Tensor&, int64_t, const IValue&)>("funcol::broadcast");
  return op.call(input, source, group);
}

Tensor reduce(const Tensor& input, const IValue& reduce_op, int64_t destination, const IValue& group) {
  if (is_watched(input)) {
    return composed::reduce(input, reduce_op, destination, group);
  }
  static const auto op = find<Tensor(const Tensor&, const IValue&, int64_t, const IValue&)>("funcol::reduce");
  return op.call(input, reduce_op, destination, group);
}

Tensor scatter(const Tensor& input, int64_t source, int64_t dim, const IValue& group,
               SplitSizes split_sizes) {
  if (is_watched(input)) {
    return composed::scatter(input, source, dim, group, split_sizes);
  }
  static const auto op =
      find<Tensor(const Tensor&, int64_t, int64_t, const IValue&, SplitSizes)>("funcol::scatter");
  return op.call(input, source, dim, group, split_sizes);
}

Tensor gather(const Tensor& input, int64_t destination, int64_t dim, const IValue& group,
              SplitSizes split_sizes) {
  if (is_watched(input)) {
    return composed::gather(input, destination, dim, group, split_sizes);
  }
  static const auto op =
      find<Tensor(const Tensor&, int64_t, int64_t, const IValue&, SplitSizes)>("funcol::gather");
  return op.call(input, destination, dim, group, split_sizes);
}

}  // namespace funcol::call
