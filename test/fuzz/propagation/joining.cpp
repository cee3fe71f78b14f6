// Operators that join tensors or write one into another.
#include "propagation/operators.h"

namespace funcol::test {
namespace {

Case cat(Bytes& bytes) {
  const Shape first = some_shape(bytes);
  const int64_t dim = bytes.below(std::ssize(first));
  std::vector<Shape> shapes;
  for (int64_t i = bytes.between(1, 3); i > 0; --i) {
    Shape shape = first;
    shape[dim] = bytes.below(5);
    shapes.push_back(bytes.below(8) == 1 ? Shape{0} : shape);
  }
  shapes.push_back(first);
  return CaseMaker(bytes, "aten::cat")
      .with_list("tensors", shapes)
      .with_value("dim", dim)
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        Shape shape = inputs.back().shape;
        shape[dim] = 0;
        std::vector<Numbers> parts;
        for (const auto& input : inputs) {
          if (input.shape == Shape{0}) {
            continue;  // skipped, whatever dims the others have
          }
          Shape other = input.shape;
          need(other.size() == shape.size(), "cat of other dims");
          shape[dim] += other[dim];
          other[dim] = shape[dim];
          need(other == shape, "cat of other sizes");
          parts.push_back(input);
        }
        return made(shape, [&](Index index) {
          size_t part = 0;
          while (index[dim] >= parts[part].shape[dim]) {
            index[dim] -= parts[part++].shape[dim];
          }
          return at(parts[part], index);
        });
      }));
}

Case stack(Bytes& bytes) {
  const Shape shape = some_shape(bytes, 0, 2);
  const int64_t dim = bytes.below(std::ssize(shape) + 1);
  return CaseMaker(bytes, "aten::stack")
      .with_list("tensors", std::vector<Shape>(bytes.between(1, 3), shape))
      .with_value("dim", dim)
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        Shape shape = inputs[0].shape;
        for (const auto& input : inputs) {
          need(input.shape == shape, "stack of other sizes");
        }
        shape.insert(shape.begin() + dim, std::ssize(inputs));
        return made(shape, [&](Index index) {
          const auto& input = inputs[index[dim]];
          index.erase(index.begin() + dim);
          return at(input, index);
        });
      }));
}

Case pad(Bytes& bytes) {
  const Shape from = some_shape(bytes);
  const auto value = static_cast<double>(bytes.below(2));
  std::vector<int64_t> amounts;  // the last dim first
  for (int64_t dims = bytes.between(1, std::ssize(from)); dims > 0; --dims) {
    amounts.push_back(bytes.below(3));
    amounts.push_back(bytes.below(3));
  }
  return CaseMaker(bytes, "aten::constant_pad_nd")
      .with("self", from)
      .with_value("pad", integers(amounts))
      .with_value("value", Argument{value})
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        Shape shape = inputs[0].shape;
        std::vector<int64_t> before(shape.size(), 0);
        for (size_t i = 0; i < amounts.size() / 2; ++i) {
          const size_t dim = shape.size() - 1 - i;
          shape[dim] += amounts[2 * i] + amounts[2 * i + 1];
          before[dim] = amounts[2 * i];
        }
        return made(shape, [&](Index index) {
          for (size_t dim = 0; dim < index.size(); ++dim) {
            index[dim] -= before[dim];
            if (index[dim] < 0 || index[dim] >= inputs[0].shape[dim]) {
              return value;
            }
          }
          return at(inputs[0], index);
        });
      }));
}

Case select_scatter(Bytes& bytes) {
  Shape shape = some_shape(bytes);
  const int64_t dim = bytes.below(std::ssize(shape));
  shape[dim] = std::max<int64_t>(shape[dim], 1);
  const int64_t place = bytes.below(shape[dim]);
  Shape source = shape;
  source.erase(source.begin() + dim);
  return CaseMaker(bytes, "aten::select_scatter")
      .with("self", shape)
      .with("src", source)
      .with_value("dim", dim)
      .with_value("index", place)
      .gives(plain([=](const std::vector<Numbers>& inputs) {
        Shape without = inputs[0].shape;
        without.erase(without.begin() + dim);
        need(without == inputs[1].shape && place < inputs[0].shape[dim], "a source of other sizes");
        return made(inputs[0].shape, [&](Index index) {
          const double own = at(inputs[0], index);
          const bool is_written = index[dim] == place;
          index.erase(index.begin() + dim);
          return is_written ? at(inputs[1], index) : own;
        });
      }));
}

}  // namespace

Case joining_case(Bytes& bytes) {
  using Make = Case (*)(Bytes&);
  return bytes.one_of<Make>({cat, stack, pad, cat, select_scatter})(bytes);
}

}  // namespace funcol::test
