// Reductions and scans along dims.
#include <algorithm>
#include <cmath>
#include <limits>

#include "layout/naive_shards.h"
#include "propagation/operators.h"

namespace funcol::test {
namespace {

using Reduce = std::function<double(const std::vector<double>&)>;

double sum_of(const std::vector<double>& numbers) {
  double sum = 0;
  for (const double number : numbers) {
    sum += number;
  }
  return sum;
}

double mean_of(const std::vector<double>& numbers) {
  return sum_of(numbers) / static_cast<double>(numbers.size());  // NaN of nothing
}

double product_of(const std::vector<double>& numbers) {
  double product = 1;
  for (const double number : numbers) {
    product *= number;
  }
  return product;
}

double greatest_of(const std::vector<double>& numbers) {
  need(!numbers.empty(), "no extreme of nothing");
  return std::ranges::max(numbers);
}

double least_of(const std::vector<double>& numbers) {
  need(!numbers.empty(), "no extreme of nothing");
  return std::ranges::min(numbers);
}

double variance_of(const std::vector<double>& numbers) {
  const double mean = mean_of(numbers);
  double sum = 0;
  for (const double number : numbers) {
    sum += (number - mean) * (number - mean);
  }
  return sum / static_cast<double>(numbers.size());
}

Reduce norm_of(double order) {
  return [order](const std::vector<double>& numbers) {
    if (std::isinf(order)) {
      std::vector<double> sizes;
      for (const double number : numbers) {
        sizes.push_back(std::abs(number));
      }
      return order > 0 ? greatest_of(sizes) : least_of(sizes);
    }
    double sum = 0;
    for (const double number : numbers) {
      sum += order == 0 ? (number != 0 ? 1 : 0) : std::pow(std::abs(number), order);
    }
    return order == 0 ? sum : std::pow(sum, 1 / order);
  };
}

// The place of the first greatest number.
double place_of_greatest(const std::vector<double>& numbers) {
  need(!numbers.empty(), "no extreme of nothing");
  return static_cast<double>(std::ranges::max_element(numbers) - numbers.begin());
}

bool has(const std::vector<int64_t>& dims, int64_t dim) { return std::ranges::find(dims, dim) != dims.end(); }

Numbers reduced(const Numbers& input, const std::vector<int64_t>& dims, bool keeps, const Reduce& reduce) {
  Shape shape;
  Shape inner;
  for (int64_t dim = 0; dim < std::ssize(input.shape); ++dim) {
    if (!has(dims, dim) || keeps) {
      shape.push_back(has(dims, dim) ? 1 : input.shape[dim]);
    }
    inner.push_back(has(dims, dim) ? input.shape[dim] : 1);
  }
  return made(shape, [&](const Index& index) {
    std::vector<double> numbers;
    for (int64_t i = 0; i < num_elements(inner); ++i) {
      Index whole = index_of(i, inner);
      size_t place = 0;
      for (int64_t dim = 0; dim < std::ssize(whole); ++dim) {
        if (!has(dims, dim)) {
          whole[dim] = index[place];
        }
        place += !has(dims, dim) || keeps ? 1 : 0;
      }
      numbers.push_back(at(input, whole));
    }
    return reduce(numbers);
  });
}

std::vector<int64_t> all_dims(const Shape& shape) { return counted(std::ssize(shape)); }

Case of_all(Bytes& bytes, const Shape& shape) {
  const std::vector<std::pair<std::string, Reduce>> ops{
      {"aten::sum", sum_of}, {"aten::mean", mean_of}, {"aten::max", greatest_of}, {"aten::min", least_of}};
  const auto& [op, reduce] = bytes.one_of(ops);
  CaseMaker maker(bytes, op);
  maker.with("self", shape);
  return maker.gives(plain([reduce = reduce](const std::vector<Numbers>& inputs) {
    return reduced(inputs[0], all_dims(inputs[0].shape), false, reduce);
  }));
}

Case of_dims(Bytes& bytes, const Shape& shape, bool keeps) {
  const auto order = bytes.one_of<double>(
      {2, 1, 0, std::numeric_limits<double>::infinity(), 3, -std::numeric_limits<double>::infinity()});
  const std::vector<std::pair<std::string, Reduce>> ops{
      {"aten::sum.dim_IntList", sum_of},     {"aten::mean.dim", mean_of},
      {"aten::amax", greatest_of},           {"aten::amin", least_of},
      {"aten::var.correction", variance_of}, {"aten::linalg_vector_norm", norm_of(order)},
  };
  const auto& [op, reduce] = bytes.one_of(ops);
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < std::ssize(shape); ++dim) {
    if (bytes.coin()) {
      dims.push_back(dim);
    }
  }
  CaseMaker maker(bytes, op);
  maker.with("self", shape);
  if (op == "aten::linalg_vector_norm") {
    maker.with_value("ord", Argument{order});
  }
  maker.with_value("dim", integers(dims)).with_value("keepdim", keeps);
  if (dims.empty()) {
    dims = all_dims(shape);
  }
  return maker.gives(plain([=, reduce = reduce](const std::vector<Numbers>& inputs) {
    return reduced(inputs[0], dims, keeps, reduce);
  }));
}

Case of_one_dim(Bytes& bytes, const Shape& shape, bool keeps) {
  const int64_t dim = bytes.below(std::ssize(shape));
  const auto op = bytes.one_of<std::string>({"aten::prod.dim_int", "aten::argmax", "aten::max.dim"});
  CaseMaker maker(bytes, op);
  maker.with("self", shape).with_value("dim", dim).with_value("keepdim", keeps);
  const auto kernel = [=](const std::vector<Numbers>& inputs, const std::vector<Shape>&) {
    const std::vector dims{dim};
    if (op == "aten::max.dim") {
      return std::vector{reduced(inputs[0], dims, keeps, greatest_of),
                         reduced(inputs[0], dims, keeps, place_of_greatest)};
    }
    return std::vector{
        reduced(inputs[0], dims, keeps, op == "aten::argmax" ? Reduce(place_of_greatest) : product_of)};
  };
  return maker.gives(kernel, {}, op == "aten::argmax" ? Dtype::kInt64 : Dtype::kFloat32);
}

Case scan(Bytes& bytes, const Shape& shape) {
  const int64_t dim = bytes.below(std::ssize(shape));
  return CaseMaker(bytes, "aten::cumsum")
      .with("self", shape)
      .with_value("dim", dim)
      .with_value("dtype", Argument{})
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        return made(inputs[0].shape, [&](const Index& index) {
          double sum = 0;
          Index before = index;
          for (before[dim] = 0; before[dim] <= index[dim]; ++before[dim]) {
            sum += at(inputs[0], before);
          }
          return sum;
        });
      }));
}

}  // namespace

Case reduction_case(Bytes& bytes) {
  const Shape shape = some_shape(bytes);
  const bool keeps = bytes.coin();
  switch (bytes.below(5)) {
    case 0:
      return of_all(bytes, shape);
    case 1:
      return of_one_dim(bytes, shape, keeps);
    case 2:
      return scan(bytes, shape);
    default:
      return of_dims(bytes, shape, keeps);
  }
}

}  // namespace funcol::test
