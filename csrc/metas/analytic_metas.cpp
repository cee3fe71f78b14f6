// Outputs of operators whose Meta kernels are written in Python and slow.
#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "metas/output_metas.h"

namespace funcol {
namespace analytic {
namespace {

using Outputs = std::vector<std::optional<TensorMeta>>;

TensorMeta contiguous(std::vector<int64_t> shape, Dtype dtype) {
  auto strides = contiguous_strides(shape);
  return {std::move(shape), std::move(strides), dtype};
}

bool is_contiguous(const TensorMeta& meta) { return meta.stride == contiguous_strides(meta.shape); }

Dtype dtype_of_statistics(Dtype dtype) {
  return dtype == Dtype::kFloat16 || dtype == Dtype::kBFloat16 ? Dtype::kFloat32 : dtype;
}

// Returns true if `last` are the last sizes of `shape`.
bool ends_with(const std::vector<int64_t>& shape, const std::vector<int64_t>& last) {
  return !last.empty() && last.size() <= shape.size() &&
         std::equal(last.rbegin(), last.rend(), shape.rbegin());
}

// Returns samples like the first tensor. Some PyTorch releases lack the Meta kernels of these operators.
std::optional<Outputs> samples(const OpCall& call) {
  const auto& first = call.tensors.at(0);
  return Outputs{contiguous(first.shape, first.dtype)};
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
    // PyTorch handles these cases: it skips empty tensors of one dim, and keeps memory formats.
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

// Returns true if every operator in this file computes with the dtype.
bool is_common(Dtype dtype) {
  return dtype <= Dtype::kFloat64 || dtype == Dtype::kBool || dtype == Dtype::kBFloat16;
}

// Returns the argument "dtype" if it is given, else `otherwise`.
Dtype dtype_or(const OpCall& call, Dtype otherwise) {
  const auto* given = call.has_arg("dtype") ? std::get_if<Dtype>(&call.arg("dtype").value) : nullptr;
  return given == nullptr ? otherwise : *given;
}

Dtype dtype_of_sum(Dtype dtype) { return is_integral(dtype) ? Dtype::kInt64 : dtype; }

// Returns a contiguous output without the reduced dims, or with size 1 in them.
std::optional<Outputs> reduced(const OpCall& call, Dtype dtype) {
  const auto& self = call.tensor("self");
  if (!is_common(self.dtype) || !is_common(dtype)) {
    return std::nullopt;
  }
  const bool names_dims = call.has_arg("dim") && !call.arg("dim").is_none();
  std::vector<bool> is_reduced(self.shape.size(), !names_dims);
  if (names_dims) {
    const auto dims = call.arg("dim").integers();
    for (const int64_t dim : dims) {
      const int64_t at = dim < 0 ? dim + self.num_dims() : dim;
      if (at < 0 || at >= self.num_dims() || is_reduced[at]) {
        return std::nullopt;
      }
      is_reduced[at] = true;
    }
    if (dims.empty()) {  // means all dims to some operators, none to others
      return std::nullopt;
    }
  }
  const bool keeps_dims = call.has_arg("keepdim") && call.arg("keepdim").boolean();
  std::vector<int64_t> shape;
  for (size_t dim = 0; dim < self.shape.size(); ++dim) {
    if (!is_reduced[dim] || keeps_dims) {
      shape.push_back(is_reduced[dim] ? 1 : self.shape[dim]);
    }
  }
  return Outputs{contiguous(std::move(shape), dtype)};
}

std::optional<Outputs> sum(const OpCall& call) {
  return reduced(call, dtype_or(call, dtype_of_sum(call.tensor("self").dtype)));
}

std::optional<Outputs> mean(const OpCall& call) {
  const auto dtype = dtype_or(call, call.tensor("self").dtype);
  return is_floating_point(dtype) ? reduced(call, dtype) : std::nullopt;
}

// Returns the reduced output, or nullopt for no elements: these have no extreme, and not every norm.
std::optional<Outputs> extreme(const OpCall& call) {
  const auto& self = call.tensor("self");
  return num_elements(self.shape) == 0 ? std::nullopt : reduced(call, self.dtype);
}

std::optional<Outputs> vector_norm(const OpCall& call) {
  const auto& self = call.tensor("self");
  return is_floating_point(self.dtype) && call.arg("dtype").is_none() ? extreme(call) : std::nullopt;
}

std::optional<Outputs> truth(const OpCall& call) {
  return call.tensor("self").dtype == Dtype::kUInt8 ? std::nullopt : reduced(call, Dtype::kBool);
}

// Returns an output with the metadata of `self`.
std::optional<Outputs> same_as_self(const OpCall& call) {
  const auto& self = call.tensor("self");
  return is_contiguous(self) && is_common(self.dtype) ? std::optional(Outputs{self}) : std::nullopt;
}

bool has_dim(const OpCall& call) {
  const int64_t num_dims = call.tensor("self").num_dims();
  const int64_t dim = call.arg("dim").integer();
  return -num_dims <= dim && dim < num_dims;
}

std::optional<Outputs> softmax(const OpCall& call) {
  const bool is_known =
      has_dim(call) && is_floating_point(call.tensor("self").dtype) && !call.arg("half_to_float").boolean();
  return is_known ? same_as_self(call) : std::nullopt;
}

std::optional<Outputs> cumulative_sum(const OpCall& call) {
  if (!has_dim(call) || !call.arg("dtype").is_none() || !same_as_self(call)) {
    return std::nullopt;
  }
  auto sum = call.tensor("self");
  sum.dtype = dtype_of_sum(sum.dtype);
  return Outputs{sum};
}

std::optional<Outputs> triangle(const OpCall& call) {
  return call.tensor("self").num_dims() < 2 ? std::nullopt : same_as_self(call);
}

// Returns the product of [..., m, k] and [..., k, n] if all tensors of the call have one dtype.
std::optional<Outputs> product(const OpCall& call, const TensorMeta& a, const TensorMeta& b,
                               int64_t num_dims) {
  const bool is_product =
      a.num_dims() == num_dims && b.num_dims() == num_dims && a.shape.back() == b.shape.at(num_dims - 2) &&
      std::equal(a.shape.begin(), a.shape.end() - 2, b.shape.begin(), b.shape.end() - 2) &&
      is_floating_point(a.dtype) && is_common(a.dtype) &&
      std::ranges::all_of(call.tensors, [&](const auto& tensor) { return tensor.dtype == a.dtype; });
  if (!is_product) {
    return std::nullopt;
  }
  auto shape = a.shape;
  shape.back() = b.shape.back();
  return Outputs{contiguous(std::move(shape), a.dtype)};
}

std::optional<Outputs> matrix_product(const OpCall& call) {
  return product(call, call.tensor("self"), call.tensor("mat2"), 2);
}

std::optional<Outputs> batch_of_products(const OpCall& call) {
  return product(call, call.tensor("self"), call.tensor("mat2"), 3);
}

// Returns the product if the summand `self` has its shape or the shape of one of its rows.
std::optional<Outputs> sum_with_product(const OpCall& call) {
  const auto& mat1 = call.tensor("mat1");
  const auto& mat2 = call.tensor("mat2");
  auto outputs = product(call, mat1, mat2, 2);
  if (!outputs) {
    return std::nullopt;
  }
  const auto& term = call.tensor("self").shape;
  const bool is_added =
      term == std::vector{mat1.shape.front(), mat2.shape.back()} || term == std::vector{mat2.shape.back()};
  return is_added ? std::move(outputs) : std::nullopt;
}

using OutputsOf = std::optional<Outputs> (*)(const OpCall&);
constexpr std::array kOutputsOfOperators = std::to_array<std::pair<std::string_view, OutputsOf>>({
    {"aten::binomial", samples},
    {"aten::_sample_dirichlet", samples},
    {"aten::_standard_gamma", samples},
    {"aten::native_layer_norm", layer_norm},
    {"aten::native_layer_norm_backward", layer_norm_backward},
    {"aten::cat", cat},
    {"aten::_softmax", softmax},
    {"aten::_log_softmax", softmax},
    {"aten::_softmax_backward_data", softmax_backward},
    {"aten::_log_softmax_backward_data", softmax_backward},
    {"aten::sum", sum},
    {"aten::sum.dim_IntList", sum},
    {"aten::mean", mean},
    {"aten::mean.dim", mean},
    {"aten::amax", extreme},
    {"aten::amin", extreme},
    {"aten::linalg_vector_norm", vector_norm},
    {"aten::any", truth},
    {"aten::any.dim", truth},
    {"aten::all", truth},
    {"aten::all.dim", truth},
    {"aten::cumsum", cumulative_sum},
    {"aten::tril", triangle},
    {"aten::triu", triangle},
    {"aten::mm", matrix_product},
    {"aten::bmm", batch_of_products},
    {"aten::addmm", sum_with_product},
});

}  // namespace
}  // namespace analytic

std::optional<std::vector<std::optional<TensorMeta>>> analytic_metas(const OpCall& call) {
  const auto* const found = std::ranges::find_if(analytic::kOutputsOfOperators,
                                                 [&](const auto& entry) { return entry.first == call.op; });
  return found == analytic::kOutputsOfOperators.end() || call.tensors.empty() ? std::nullopt
                                                                              : found->second(call);
}

}  // namespace funcol
