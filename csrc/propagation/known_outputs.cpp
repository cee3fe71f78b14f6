#include "propagation/known_outputs.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace funcol {
namespace {

using Outputs = std::vector<std::optional<TensorMeta>>;

TensorMeta contiguous(std::vector<int64_t> shape, Dtype dtype) {
  std::vector<int64_t> stride(shape.size());
  int64_t step = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    stride[dim] = step;
    step *= std::max<int64_t>(shape[dim], 1);
  }
  return {std::move(shape), std::move(stride), dtype};
}

bool is_contiguous(const TensorMeta& meta) {
  return meta.stride == contiguous(meta.shape, meta.dtype).stride;
}

Dtype dtype_of_statistics(Dtype dtype) {
  return dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16 ? Dtype::kFloat32 : dtype;
}

// The normalized dims are the last ones of the input.
bool ends_with(const std::vector<int64_t>& shape, const std::vector<int64_t>& last) {
  return !last.empty() && last.size() <= shape.size() &&
         std::equal(last.rbegin(), last.rend(), shape.rbegin());
}

std::optional<Outputs> layer_norm(const OpCall& call) {
  const auto& input = call.tensor("input");
  const auto normalized = call.arg("normalized_shape").integers();
  if (!ends_with(input.shape, normalized)) {
    return std::nullopt;
  }
  auto statistics = input.shape;
  std::fill(statistics.end() - static_cast<std::ptrdiff_t>(normalized.size()), statistics.end(), 1);
  const auto statistic = contiguous(std::move(statistics), dtype_of_statistics(input.dtype));
  return Outputs{contiguous(input.shape, input.dtype), statistic, statistic};
}

std::optional<Outputs> layer_norm_backward(const OpCall& call) {
  const auto& input = call.tensor("input");
  if (!ends_with(input.shape, call.arg("normalized_shape").integers()) || !is_contiguous(input)) {
    return std::nullopt;
  }
  Outputs outputs(3);
  const auto& mask = call.arg("output_mask").list();
  if (mask.at(0).boolean()) {
    outputs[0] = input;
  }
  constexpr std::array<std::string_view, 2> kParameters = {"weight", "bias"};
  for (size_t i = 0; i < kParameters.size(); ++i) {
    if (mask.at(i + 1).boolean() && !call.arg(kParameters[i]).is_none()) {
      const auto& parameter = call.tensor(kParameters[i]);
      outputs[i + 1] = contiguous(parameter.shape, parameter.dtype);
    }
  }
  return outputs;
}

std::optional<Outputs> cat(const OpCall& call) {
  const auto& first = call.tensors.at(0);
  const auto dim = call.arg("dim").integer();
  const auto at = static_cast<size_t>(dim < 0 ? dim + first.num_dims() : dim);
  auto shape = first.shape;
  if (at >= shape.size()) {
    return std::nullopt;
  }
  shape[at] = 0;
  for (const auto& tensor : call.tensors) {
    // Empty tensors of one dim are passed over, layouts other than contiguous are kept: not here.
    if (tensor.dtype != first.dtype || tensor.shape.size() != shape.size() || !is_contiguous(tensor) ||
        (tensor.shape.size() == 1 && tensor.shape[0] == 0)) {
      return std::nullopt;
    }
    for (size_t other = 0; other < shape.size(); ++other) {
      if (other != at && tensor.shape[other] != shape[other]) {
        return std::nullopt;
      }
    }
    shape[at] += tensor.shape[at];
  }
  return Outputs{contiguous(std::move(shape), first.dtype)};
}

std::optional<Outputs> softmax_backward(const OpCall& call) {
  const auto& gradient = call.tensor("grad_output");
  const auto* dtype = std::get_if<Dtype>(&call.arg("input_dtype").value);
  if (dtype == nullptr || *dtype != gradient.dtype || !is_contiguous(gradient) ||
      gradient.shape != call.tensor("output").shape) {
    return std::nullopt;
  }
  return Outputs{gradient};
}

}  // namespace

std::optional<std::vector<std::optional<TensorMeta>>> known_outputs(const OpCall& call) {
  using Known = std::optional<Outputs> (*)(const OpCall&);
  constexpr std::array<std::pair<std::string_view, Known>, 5> kKnown = {{
      {"aten::native_layer_norm", layer_norm},
      {"aten::native_layer_norm_backward", layer_norm_backward},
      {"aten::cat", cat},
      {"aten::_softmax_backward_data", softmax_backward},
      {"aten::_log_softmax_backward_data", softmax_backward},
  }};
  const auto* const known =
      std::ranges::find_if(kKnown, [&](const auto& entry) { return entry.first == call.op; });
  return known == kKnown.end() || call.tensors.empty() ? std::nullopt : known->second(call);
}

}  // namespace funcol
