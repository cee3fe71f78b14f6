// Products of vectors and matrices.
#include <map>

#include "propagation/operators.h"

namespace funcol::test {
namespace {

// A sum of products over the letters that the result lacks, with a summand: "mk,kn->mn" with `summand` 0 is
// addmm. Letters of one size in all tensors.
Kernel contraction(const std::vector<std::string>& operands, const std::string& result, int64_t summand) {
  return plain([=](const std::vector<Numbers>& inputs) {
    std::map<char, int64_t> sizes;
    std::vector<Numbers> factors = inputs;
    if (summand >= 0) {
      factors.erase(factors.begin() + summand);
    }
    for (size_t i = 0; i < operands.size(); ++i) {
      need(factors[i].shape.size() == operands[i].size(), "wrong number of dims");
      for (size_t dim = 0; dim < operands[i].size(); ++dim) {
        const auto [known, is_new] = sizes.try_emplace(operands[i][dim], factors[i].shape[dim]);
        need(is_new || known->second == factors[i].shape[dim], "sizes of a product differ");
      }
    }
    std::string letters = result;
    for (const auto& [letter, size] : sizes) {
      letters += letters.find(letter) == std::string::npos ? std::string(1, letter) : "";
    }
    const auto shape_of = [&](const std::string& of) {
      Shape shape;
      for (const char letter : of) {
        shape.push_back(sizes.at(letter));
      }
      return shape;
    };
    const Shape all = shape_of(letters);
    Numbers sums = made(shape_of(result), [&](const Index& index) {
      return summand < 0 ? 0 : broadcast_at(inputs[summand], index);
    });
    if (summand >= 0) {
      need(broadcast_shape({sums, inputs[summand]}) == sums.shape, "a summand larger than the product");
    }
    for (int64_t element = 0; element < num_elements(all); ++element) {
      const Index index = index_of(element, all);
      double product = 1;
      for (size_t i = 0; i < operands.size(); ++i) {
        Index own;
        for (const char letter : operands[i]) {
          own.push_back(index[letters.find(letter)]);
        }
        product *= at(factors[i], own);
      }
      sums.values[element_at({index.begin(), index.begin() + static_cast<int64_t>(result.size())},
                             sums.shape)] += product;
    }
    return sums;
  });
}

struct Product {
  std::string op;
  std::vector<std::string> names;
  std::vector<std::string> operands;
  std::string result;
  std::string summand;  // its name; empty if there is none
  bool is_last = false;
};

}  // namespace

Case product_case(Bytes& bytes) {
  const std::vector<Product> products{
      {"aten::mm", {"self", "mat2"}, {"mk", "kn"}, "mn", ""},
      {"aten::bmm", {"self", "mat2"}, {"bmk", "bkn"}, "bmn", ""},
      {"aten::mv", {"self", "vec"}, {"mk", "k"}, "m", ""},
      {"aten::dot", {"self", "tensor"}, {"k", "k"}, "", ""},
      {"aten::addmm", {"mat1", "mat2"}, {"mk", "kn"}, "mn", "self"},
      {"aten::baddbmm", {"batch1", "batch2"}, {"bmk", "bkn"}, "bmn", "self"},
      {"aten::addmv", {"mat", "vec"}, {"mk", "k"}, "m", "self"},
      {"aten::linear", {"input", "weight"}, {"amk", "nk"}, "amn", "bias", true},
      {"aten::linear", {"input", "weight"}, {"mk", "nk"}, "mn", ""},
  };
  const auto product = bytes.one_of(products);
  std::map<char, int64_t> sizes;
  const auto shape_of = [&](const std::string& letters) {
    Shape shape;
    for (const char letter : letters) {
      shape.push_back(
          sizes.try_emplace(letter, bytes.one_of<int64_t>({4, 2, 3, 1, 5, 6, 8, 0})).first->second);
    }
    return shape;
  };
  std::vector<Shape> shapes;
  for (const auto& operand : product.operands) {
    shapes.push_back(shape_of(operand));
  }
  Shape summand = shape_of(product.result);
  if (product.is_last) {
    summand = {summand.back()};
  } else if (!summand.empty() && bytes.coin()) {
    summand.front() = 1;
  }
  CaseMaker maker(bytes, product.op);
  const auto add_summand = [&] { maker.with(product.summand, summand); };
  if (!product.summand.empty() && !product.is_last) {
    add_summand();
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    maker.with(product.names[i], shapes[i]);
  }
  if (product.is_last) {
    add_summand();
  }
  if (!product.summand.empty() && !product.is_last) {
    maker.with_value("beta", int64_t{1}).with_value("alpha", int64_t{1});
  } else if (product.summand.empty() && product.op == "aten::linear") {
    maker.with_value("bias", Argument{});
  }
  const int64_t place = product.summand.empty() ? -1 : product.is_last ? 2 : 0;
  return maker.gives(contraction(product.operands, product.result, place));
}

}  // namespace funcol::test
