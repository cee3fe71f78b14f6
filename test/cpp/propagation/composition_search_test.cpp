#include "propagation/composition_search.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "planner/tasks.h"
#include "propagation/calls.h"
#include "propagation/full_product.h"

namespace funcol::composition_search_test {
namespace {

using ::testing::Combine;
using ::testing::Range;
using ::testing::Values;

// Costs are sums of a few numbers. The two sides add them in different orders.
constexpr double kRounding = 1e-9;

struct Family {
  std::string name;
  std::vector<std::string> rows;
  std::vector<std::vector<int64_t>> dims_of_inputs;  // which of the sizes m, n, k, l
  std::vector<int64_t> dims_of_output;
};

const std::vector<Family> kFamilies = {
    {"add",
     {"S0* <- S0*,S0*", "S1* <- S1*,S1*", "P <- P,P", "P(avg) <- P(avg),P(avg)"},
     {{0, 1}, {0, 1}},
     {0, 1}},
    {"mul", {"S0 <- S0,S0", "S1 <- S1,S1", "P <- P,R", "P <- R,P"}, {{0, 1}, {0, 1}}, {0, 1}},
    {"mm", {"S0 <- S0,R", "S1 <- R,S1", "P <- S1,S0", "P <- P,R", "P <- R,P"}, {{0, 2}, {2, 1}}, {0, 1}},
    {"sum", {"P <- S0*", "S0* <- S1*", "P <- P"}, {{0, 1}}, {1}},
    {"softmax", {"S0 <- S0", "S2 <- S2"}, {{0, 1, 2}}, {0, 1, 2}},
    {"addmm", {"S0 <- R,S0,R", "S1 <- S0,R,S1", "P <- P,S1,S0", "P <- P,P,R"}, {{1}, {0, 2}, {2, 1}}, {0, 1}},
    {"bmm",
     {"S0 <- S0,S0", "S1 <- S1,R", "S2 <- R,S2", "P <- S2,S1", "P <- P,R"},
     {{3, 0, 2}, {3, 2, 1}},
     {3, 0, 1}},
    {"attention",
     {"S0 <- S0,S0,S0", "S1 <- S1,S1,S1"},
     {{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 1, 2, 3}},
     {0, 1, 2, 3}},
    {"embedding",
     {"S2 <- S1*,R", "M <- S0,M", "S0 <- R,S0", "S1 <- R,S1", "P <- P,R"},
     {{0, 1}, {2, 3}},
     {2, 3, 1}},
};

struct Case {
  OpCall call;
  Rows rows;
  Mesh mesh;
  std::vector<Operand> operands;
  std::vector<std::optional<Layout>> required;
  CostModel model;
};

std::string described(const Case& one) {
  std::string text = one.call.op + ", mesh " + test::joined(one.mesh.sizes);
  for (size_t i = 0; i < one.operands.size(); ++i) {
    text += ", " + test::joined(one.call.tensors[i].shape) + " " + to_string(one.operands[i].source);
    text += one.operands[i].is_pinned ? " stays" : "";
  }
  for (const auto& layout : one.required) {
    text += layout ? ", required " + to_string(*layout) : "";
  }
  return text;
}

// A random case. Its numbers depend on the seed alone, not on the standard library.
class RandomCase {
 public:
  explicit RandomCase(uint32_t seed)
      : random_(seed), op_(one_of<PartialOp>({PartialOp::kSum, PartialOp::kSum, PartialOp::kAvg})) {}

  Case make(const Family& family, int64_t num_axes, bool counts) {
    Case one;
    for (int64_t axis = 0; axis < num_axes; ++axis) {
      one.mesh.sizes.push_back(one_of<int64_t>({2, 2, 3, 1}));
    }
    std::vector<int64_t> sizes(4);
    for (auto& size : sizes) {
      size = one_of<int64_t>({1, 2, 3, 4, 8, 12, 5, 24});
    }
    const auto shaped = [&](const std::vector<int64_t>& dims) {
      std::vector<int64_t> shape;
      shape.reserve(dims.size());
      for (const int64_t dim : dims) {
        shape.push_back(sizes[dim]);
      }
      return test::tensor(std::move(shape));
    };
    one.call.op = family.name;
    for (const auto& dims : family.dims_of_inputs) {
      one.call.tensors.push_back(shaped(dims));
      one.operands.push_back({layout(one.mesh, static_cast<int64_t>(dims.size()))});
    }
    one.call.outputs.emplace_back(shaped(family.dims_of_output));
    one.rows = test::rows_from_texts(family.rows, below(2) == 0);
    one.model = counts ? CostModel(StepCounts{}) : CostModel(default_alpha_beta(one.mesh));
    return one;
  }

  int64_t below(int64_t end) { return static_cast<int64_t>(random_() % static_cast<uint32_t>(end)); }

  Layout layout(const Mesh& mesh, int64_t num_dims) {
    std::vector<Placement> placements;
    for (size_t axis = 0; axis < mesh.sizes.size(); ++axis) {
      const auto choice = below(10);
      placements.push_back(choice < 2   ? Placement::partial(op_)
                           : choice < 4 ? Placement::replicate()
                                        : Placement::shard(below(num_dims), below(8) == 0 ? 2 : 1));
    }
    ShardOrder order = default_shard_order(placements);
    for (auto& cuts : order) {
      for (size_t i = cuts.size(); i > 1; --i) {
        std::swap(cuts[i - 1], cuts[below(static_cast<int64_t>(i))]);
      }
    }
    return make_layout("test", placements, order, mesh, num_dims);
  }

 private:
  template <typename T>
  T one_of(const std::vector<T>& choices) {
    return choices[below(static_cast<int64_t>(choices.size()))];
  }

  std::mt19937 random_;
  PartialOp op_;
};

std::optional<PricedComposition> choice_of(const Case& one) {
  SearchPool costs(one.mesh, one.model);
  return cheapest_composition(one.call, one.rows, one.operands, one.required, costs);
}

test::FullProduct full_product(const Case& one) {
  return {one.call, one.rows, one.mesh, one.operands, one.required, one.model};
}

double total(const std::vector<double>& costs) { return std::accumulate(costs.begin(), costs.end(), 0.0); }

class RandomCall : public ::testing::TestWithParam<std::tuple<size_t, int, int>> {
 protected:
  static Case make(bool counts) {
    const auto& [family, num_axes, seed] = GetParam();
    RandomCase random(static_cast<uint32_t>(1000 * seed + 10 * num_axes) + static_cast<uint32_t>(family));
    return random.make(kFamilies[family], num_axes, counts);
  }
};

TEST_P(RandomCall, CostsTheLeastOfItsFullProduct) {
  const Case one = make(false);
  const auto product = full_product(one);
  const double least = product.preferred()->total();
  EXPECT_NEAR(total(choice_of(one)->costs), least, kRounding * least) << described(one);
}

TEST_P(RandomCall, IsTheFirstOfEqualsWhenStepsAreCounted) {
  const Case one = make(true);
  EXPECT_EQ(choice_of(one)->composition, full_product(one).preferred()->composition) << described(one);
}

TEST_P(RandomCall, MovesAnInputOnlyIfNoCompositionLeavesAllInPlace) {
  const Case one = make(false);
  const auto product = full_product(one);
  EXPECT_EQ(choice_of(one)->moves, !product.is_unmoved(*product.preferred())) << described(one);
}

TEST_P(RandomCall, IsChosenAlikeWithWhatIsKnownFromBefore) {
  const Case one = make(false);
  SearchPool costs(one.mesh, one.model);
  const auto first = cheapest_composition(one.call, one.rows, one.operands, one.required, costs);
  const auto again = cheapest_composition(one.call, one.rows, one.operands, one.required, costs);
  EXPECT_EQ(first->composition, again->composition) << described(one);
}

INSTANTIATE_TEST_SUITE_P(Families, RandomCall,
                         Combine(Range<size_t>(0, kFamilies.size()), Range(1, 4), Range(0, 12)),
                         [](const auto& param) {
                           return kFamilies[std::get<0>(param.param)].name + "_on_" +
                                  std::to_string(std::get<1>(param.param)) + "_axes_" +
                                  std::to_string(std::get<2>(param.param));
                         });

class FullProductOf : public ::testing::TestWithParam<std::tuple<size_t, int, int>> {
 protected:
  static Case make() {
    const auto& [family, num_axes, seed] = GetParam();
    RandomCase random(static_cast<uint32_t>(seed));
    return random.make(kFamilies[family], num_axes, true);
  }

  static std::vector<PricedComposition> choices_of(const Case& one) {
    SearchPool costs(one.mesh, one.model);
    return legal_compositions(one.call, one.rows, one.operands, one.required, costs);
  }
};

TEST_P(FullProductOf, IsWrittenOutInItsOrder) {
  const Case one = make();
  std::vector<Composition> choices;
  for (const auto& choice : choices_of(one)) {
    choices.push_back(choice.composition);
  }
  const auto product = full_product(one);
  std::vector<Composition> expected;
  for (const auto& priced : product.all()) {
    expected.push_back(priced.composition);
  }
  EXPECT_EQ(choices, expected) << described(one);
}

TEST_P(FullProductOf, IsPricedInputByInput) {
  const Case one = make();
  std::vector<std::vector<double>> choices;
  for (const auto& choice : choices_of(one)) {
    choices.push_back(choice.costs);
  }
  const auto product = full_product(one);
  std::vector<std::vector<double>> expected;
  for (const auto& priced : product.all()) {
    expected.push_back(priced.costs);
  }
  EXPECT_EQ(choices, expected) << described(one);
}

INSTANTIATE_TEST_SUITE_P(Families, FullProductOf,
                         Combine(Range<size_t>(0, kFamilies.size()), Values(1, 2), Range(0, 6)));

}  // namespace
}  // namespace funcol::composition_search_test
