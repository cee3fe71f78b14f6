// Operators that treat each element alike, with operands that are broadcast.
#include <cmath>

#include "propagation/operators.h"
#include "simulated_ranks.h"

namespace funcol::test {
namespace {

using Function = std::function<double(const std::vector<double>&)>;

Kernel elementwise(Function function) {
  return plain([function = std::move(function)](const std::vector<Numbers>& inputs) {
    return made(broadcast_shape(inputs), [&](const Index& index) {
      std::vector<double> numbers;
      numbers.reserve(inputs.size());
      for (const auto& input : inputs) {
        numbers.push_back(broadcast_at(input, index));
      }
      return function(numbers);
    });
  });
}

// A shape that broadcasts with `shape`: some of its last dims, some of them of size 1.
Shape operand_shape(Bytes& bytes, const Shape& shape) {
  const auto skipped = bytes.below(4) == 1 ? bytes.below(static_cast<int64_t>(shape.size()) + 1) : 0;
  Shape operand(shape.begin() + skipped, shape.end());
  for (auto& size : operand) {
    size = bytes.below(6) == 1 ? 1 : size;
  }
  return operand;
}

Case unary(Bytes& bytes) {
  const std::vector<std::pair<std::string, Function>> ops{
      {"aten::neg", [](const auto& x) { return -x[0]; }},
      {"aten::abs", [](const auto& x) { return std::abs(x[0]); }},
      {"aten::relu", [](const auto& x) { return std::max(x[0], 0.0); }},
      {"aten::sign", [](const auto& x) { return x[0] > 0   ? 1.0
                                                : x[0] < 0 ? -1.0
                                                           : 0.0; }},
      {"aten::exp", [](const auto& x) { return std::exp(x[0] / kUnit); }},
      {"aten::clone", [](const auto& x) { return x[0]; }},
      {"aten::square", [](const auto& x) { return x[0] * x[0]; }},
      {"aten::zeros_like", [](const auto&) { return 0.0; }},
  };
  const auto& [op, function] = bytes.one_of(ops);
  auto made = CaseMaker(bytes, op).with("self", some_shape(bytes, 0)).gives(elementwise(function));
  made.may_be_in_place = op != "aten::clone" && op != "aten::zeros_like";
  return made;
}

Case with_number(Bytes& bytes) {
  const auto number = static_cast<double>(bytes.between(-3, 3));
  const std::vector<std::pair<std::string, Function>> ops{
      {"aten::mul.Scalar", [=](const auto& x) { return x[0] * number; }},
      {"aten::div.Scalar", [=](const auto& x) { return x[0] / (number == 0 ? 1 : number); }},
      {"aten::add.Scalar", [=](const auto& x) { return x[0] + number; }},
      {"aten::sub.Scalar", [=](const auto& x) { return x[0] - number; }},
      {"aten::rsub.Scalar", [=](const auto& x) { return number - x[0]; }},
      {"aten::pow.Tensor_Scalar", [=](const auto& x) { return std::pow(x[0], number); }},
      {"aten::gt.Scalar", [=](const auto& x) { return x[0] > number ? 1.0 : 0.0; }},
      {"aten::clamp_min", [=](const auto& x) { return std::max(x[0], number); }},
  };
  const auto& [op, function] = bytes.one_of(ops);
  CaseMaker maker(bytes, op);
  maker.with("self", some_shape(bytes, 0));
  maker.with_value(op == "aten::pow.Tensor_Scalar" ? "exponent"
                   : op == "aten::clamp_min"       ? "min"
                                                   : "other",
                   Argument{number});
  if (op == "aten::add.Scalar" || op == "aten::sub.Scalar" || op == "aten::rsub.Scalar") {
    maker.with_value("alpha", int64_t{1});
  }
  return maker.gives(elementwise(function), {}, op == "aten::gt.Scalar" ? Dtype::kBool : Dtype::kFloat32);
}

Case binary(Bytes& bytes) {
  const auto alpha = bytes.between(-2, 2);
  const auto factor = static_cast<double>(alpha);
  const std::vector<std::pair<std::string, Function>> ops{
      {"aten::add.Tensor", [=](const auto& x) { return x[0] + factor * x[1]; }},
      {"aten::sub.Tensor", [=](const auto& x) { return x[0] - factor * x[1]; }},
      {"aten::rsub.Tensor", [=](const auto& x) { return x[1] - factor * x[0]; }},
      {"aten::mul.Tensor", [](const auto& x) { return x[0] * x[1]; }},
      {"aten::div.Tensor", [](const auto& x) { return x[0] / (x[1] == 0 ? 1 : x[1]); }},
      {"aten::maximum", [](const auto& x) { return std::max(x[0], x[1]); }},
      {"aten::minimum", [](const auto& x) { return std::min(x[0], x[1]); }},
      {"aten::eq.Tensor", [](const auto& x) { return x[0] == x[1] ? 1.0 : 0.0; }},
  };
  const auto& [op, function] = bytes.one_of(ops);
  const Shape shape = some_shape(bytes);
  CaseMaker maker(bytes, op);
  maker.with("self", bytes.below(4) == 1 ? operand_shape(bytes, shape) : shape);
  maker.with("other", bytes.coin() ? operand_shape(bytes, shape) : shape);
  if (op == "aten::add.Tensor" || op == "aten::sub.Tensor" || op == "aten::rsub.Tensor") {
    maker.with_value("alpha", alpha);
  }
  auto made =
      maker.gives(elementwise(function), {}, op == "aten::eq.Tensor" ? Dtype::kBool : Dtype::kFloat32);
  made.may_be_in_place =
      op != "aten::eq.Tensor" && op != "aten::maximum" && op != "aten::minimum" && op != "aten::rsub.Tensor";
  return made;
}

Case of_three(Bytes& bytes) {
  const Shape shape = some_shape(bytes);
  const auto other = operand_shape(bytes, shape);
  const auto value = static_cast<double>(bytes.between(-2, 2));
  switch (bytes.below(4)) {
    case 0:
      return CaseMaker(bytes, "aten::where.self")
          .with_bools("condition", operand_shape(bytes, shape))
          .with("self", shape)
          .with("other", other)
          .gives(elementwise([](const auto& x) { return x[0] != 0 ? x[1] : x[2]; }));
    case 1:
      return CaseMaker(bytes, "aten::addcmul")
          .with("self", shape)
          .with("tensor1", other)
          .with("tensor2", shape)
          .with_value("value", Argument{value})
          .gives(elementwise([=](const auto& x) { return x[0] + value * x[1] * x[2]; }));
    case 2:
      return CaseMaker(bytes, "aten::lerp.Tensor")
          .with("self", shape)
          .with("end", shape)
          .with("weight", other)
          .gives(elementwise([](const auto& x) { return x[0] + x[2] * (x[1] - x[0]); }));
    default:
      return CaseMaker(bytes, "aten::masked_fill.Scalar")
          .with("self", shape)
          .with_bools("mask", other)
          .with_value("value", Argument{value})
          .gives(elementwise([=](const auto& x) { return x[1] != 0 ? value : x[0]; }));
  }
}

Case of_one_element(Bytes& bytes) {
  switch (bytes.below(4)) {
    case 0:
      return unary(bytes);
    case 1:
      return with_number(bytes);
    case 2:
      return binary(bytes);
    default:
      return of_three(bytes);
  }
}

}  // namespace

Case pointwise_case(Bytes& bytes) {
  auto made = of_one_element(bytes);
  if (bytes.below(4) == 1) {
    put_in_list(made);
  }
  return made;
}

}  // namespace funcol::test
