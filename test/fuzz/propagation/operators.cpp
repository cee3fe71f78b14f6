#include "propagation/operators.h"

#include "layout/hash.h"
#include "layout/naive_shards.h"
#include "propagation/rule.h"
#include "simulated_ranks.h"

namespace funcol::test {

CaseMaker& CaseMaker::with(const std::string& name, const Shape& shape) {
  call_.with(name, tensor(shape));
  wholes_.push_back(numbers(shape));
  return *this;
}

CaseMaker& CaseMaker::with_bools(const std::string& name, const Shape& shape) {
  call_.with(name, tensor(shape, Dtype::kBool));
  wholes_.push_back(numbers(shape));
  for (double& value : wholes_.back().values) {
    value = value > 0 ? 1 : 0;
  }
  return *this;
}

CaseMaker& CaseMaker::with_indices(const std::string& name, const Shape& shape, int64_t end, bool once) {
  call_.with(name, tensor(shape, Dtype::kInt64));
  wholes_.push_back(numbers(shape));
  std::vector<int64_t> left = counted(end);
  bytes_.shuffle(left);
  for (double& value : wholes_.back().values) {
    const auto chosen = static_cast<int64_t>(std::abs(value) / kUnit) % end;
    value = static_cast<double>(once ? left.at(&value - wholes_.back().values.data()) : chosen);
  }
  return *this;
}

CaseMaker& CaseMaker::with_list(const std::string& name, const std::vector<Shape>& shapes) {
  std::vector<std::optional<TensorMeta>> metas;
  for (const auto& shape : shapes) {
    metas.emplace_back(tensor(shape));
    wholes_.push_back(numbers(shape));
  }
  call_.with_list(name, metas);
  return *this;
}

Numbers CaseMaker::numbers(const Shape& shape) {
  const auto seed = static_cast<uint64_t>(bytes_.below(256));
  Numbers drawn{shape, {}};
  for (int64_t i = 0; i < num_elements(shape); ++i) {
    Hash hash;
    hash.add(seed);
    hash.add(++num_drawn_);
    drawn.values.push_back(kUnit * (static_cast<double>(hash.value() % 9) - 4));
  }
  return drawn;
}

Case CaseMaker::gives(Kernel kernel, const std::vector<Shape>& shapes, Dtype dtype) {
  std::vector<std::optional<TensorMeta>> outputs;
  for (const auto& result : kernel(wholes_, shapes)) {
    // A second result holds the places of the first one's elements.
    outputs.emplace_back(tensor(result.shape, outputs.empty() ? dtype : Dtype::kInt64));
  }
  return {call_.gives(outputs), std::move(wholes_), std::move(kernel)};
}

void put_in_list(Case& of) {
  auto op = of.call.op;
  op.insert(op.find("::") + 2, "_foreach_");
  if (op.ends_with(".Tensor")) {
    op.replace(op.rfind("Tensor"), std::string::npos, "List");
  }
  if (find_rule(op) == nullptr) {
    return;
  }
  of.call.op = op;
  of.is_of_list = true;
  for (auto& [name, argument] : of.call.args) {
    if (op.starts_with("aten::_foreach_lerp")) {
      name = name == "end" ? "tensors1" : name == "weight" ? "weights" : name;
    }
  }
}

Kernel plain(std::function<Numbers(const std::vector<Numbers>&)> kernel) {
  return [kernel = std::move(kernel)](const std::vector<Numbers>& inputs, const std::vector<Shape>&) {
    return std::vector{kernel(inputs)};
  };
}

Numbers made(const Shape& shape, const std::function<double(const Index&)>& number) {
  Numbers result{shape, {}};
  for (int64_t i = 0; i < num_elements(shape); ++i) {
    result.values.push_back(number(index_of(i, shape)));
  }
  return result;
}

double at(const Numbers& numbers, const Index& index) {
  return numbers.values.at(element_at(index, numbers.shape));
}

double broadcast_at(const Numbers& numbers, const Index& index) {
  const size_t before = index.size() - numbers.shape.size();
  Index own(numbers.shape.size());
  for (size_t dim = 0; dim < own.size(); ++dim) {
    own[dim] = numbers.shape[dim] == 1 ? 0 : index[before + dim];
  }
  return at(numbers, own);
}

Shape broadcast_shape(const std::vector<Numbers>& inputs) {
  size_t num_dims = 0;
  for (const auto& input : inputs) {
    num_dims = std::max(num_dims, input.shape.size());
  }
  Shape shape(num_dims, 1);
  for (const auto& input : inputs) {
    for (size_t dim = 0; dim < input.shape.size(); ++dim) {
      const int64_t size = input.shape[dim];
      int64_t& known = shape[num_dims - input.shape.size() + dim];
      need(size == known || size == 1 || known == 1, "sizes that cannot be broadcast");
      known = size == 1 ? known : size;
    }
  }
  return shape;
}

int64_t size_of(const Numbers& numbers, int64_t dim) {
  need(dim >= 0 && dim < static_cast<int64_t>(numbers.shape.size()), "no such dim");
  return numbers.shape[dim];
}

void need(bool holds, const std::string& what) {
  if (!holds) {
    throw CannotRun(what);
  }
}

}  // namespace funcol::test
