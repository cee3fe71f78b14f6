// PyTorch's choice, case by case, and against the full product that PyTorch writes out.
#include "propagation/upstream_search.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "planner/dtensor_costs.h"
#include "propagation/calls.h"
#include "propagation/upstream_plans.h"

namespace funcol::upstream_search_test {
namespace {

using test::row;
using test::tensor;

Layout layout(const std::string& text) {
  auto placements = parse_placements(text);
  auto order = default_shard_order(placements);
  return {std::move(placements), std::move(order)};
}

UpstreamQuestion question(std::vector<int64_t> mesh, const std::vector<std::string>& rows,
                          const std::vector<std::string>& sources,
                          const std::vector<int64_t>& shape = {24, 24}) {
  UpstreamQuestion asked;
  asked.mesh = {std::move(mesh), {}, {}};
  asked.num_outputs = 1;
  asked.split_factors = {1};
  for (const auto& text : rows) {
    asked.rows.push_back(row(text));
  }
  for (const auto& source : sources) {
    asked.operands.push_back({tensor(shape), layout(source)});
  }
  return asked;
}

// "S(0) <- S(0),R" of each axis.
std::string to_text(const std::optional<UpstreamChoice>& choice) {
  std::string text = choice ? "" : "none";
  for (const auto& chosen : choice ? choice->rows : std::vector<Row>{}) {
    text += (text.empty() ? "" : "; ") + (chosen.outputs[0] ? to_string(*chosen.outputs[0]) : "-") + " <- ";
    for (size_t i = 0; i < chosen.inputs.size(); ++i) {
      text += (i == 0 ? "" : ",") + to_string(chosen.inputs[i]);
    }
  }
  return text;
}

const std::vector<std::string> kAdd{"S0* <- S0*,S0*", "S1* <- S1*,S1*", "P <- P,P"};

TEST(UpstreamChoice, TakesTheCheapestComposition) {
  EXPECT_EQ(to_text(upstream_choice(question({2}, kAdd, {"S0", "P"}))), "S(0) <- S(0),S(0)");
}

TEST(UpstreamChoice, TakesTheLastOfThoseWithoutMoves) {
  EXPECT_EQ(to_text(upstream_choice(question({2}, {"P <- R,R", "S0 <- R,R"}, {"R", "R"}))), "S(0) <- R,R");
}

TEST(UpstreamChoice, TakesTheFirstOfThoseOfElementsOfLists) {
  auto asked = question({2}, {"P <- R,R", "S0 <- R,R"}, {"R", "R"});
  asked.prefers_unmoved = false;
  EXPECT_EQ(to_text(upstream_choice(asked)), "R <- R,R");
}

TEST(UpstreamChoice, LeavesOutRowsOfShardsWhereNothingIsSharded) {
  auto asked = question({2}, kAdd, {"P", "R"});
  asked.split_factors = {};
  EXPECT_EQ(to_text(upstream_choice(asked)), "P(sum) <- P(sum),P(sum)");
}

TEST(UpstreamChoice, DoesNotMixPartials) {
  const auto asked = question({2, 2}, {"P <- P", "P(max) <- P(max)"}, {"P,P(max)"});
  EXPECT_EQ(to_text(upstream_choice(asked)), "R <- R; P(max) <- P(max)");
}

TEST(UpstreamChoice, LetsSumsAndAveragesMeet) {
  const auto asked = question({2, 2}, {"P <- P", "P(avg) <- P(avg)"}, {"P,P(avg)"});
  EXPECT_EQ(to_text(upstream_choice(asked)), "P(sum) <- P(sum); P(avg) <- P(avg)");
}

TEST(UpstreamChoice, LeavesNoRankWithoutElements) {
  EXPECT_EQ(to_text(upstream_choice(question({4}, {"S0* <- S0*"}, {"S0"}, {3, 3}))), "R <- R");
}

TEST(UpstreamChoice, LeavesElementsWhereTheyAreIfTheRuleAllows) {
  auto asked = question({4}, {"S0* <- S0*"}, {"S0"}, {3, 3});
  asked.allows_uneven = true;
  EXPECT_EQ(to_text(upstream_choice(asked)), "S(0) <- S(0)");
}

TEST(UpstreamChoice, KeepsATensorThatIsWrittenTo) {
  auto asked = question({2}, kAdd, {"R", "S0"});
  asked.is_in_place = true;
  EXPECT_EQ(to_text(upstream_choice(asked)), "R <- R,R");
}

TEST(UpstreamChoice, RefusesToMoveATensorThatIsWrittenTo) {
  auto asked = question({2}, {"S0* <- S0*,S0*"}, {"P", "S0"});
  asked.is_in_place = true;
  EXPECT_EQ(to_text(upstream_choice(asked)), "none");
}

TEST(UpstreamChoice, TakesARowWithoutAPriceWhereThereIsNoOther) {
  auto asked = question({2}, kAdd, {"P", "S0"});
  asked.is_in_place = true;
  EXPECT_EQ(to_text(upstream_choice(asked)), "P(sum) <- P(sum),P(sum)");
}

TEST(UpstreamChoice, HasTheResultWhereItIsGiven) {
  auto asked = question({2}, kAdd, {"S0", "S0"});
  asked.required = {parse_placements("S1")};
  EXPECT_EQ(to_text(upstream_choice(asked)), "S(1) <- S(1),S(1)");
}

TEST(UpstreamChoice, AsksTheFilter) {
  auto asked = question({2}, kAdd, {"S0", "S0"});
  asked.accepts = [](const std::vector<Row>& rows) { return !rows[0].outputs[0]->is_shard(); };
  EXPECT_EQ(to_text(upstream_choice(asked)), "R <- R,R");
}

TEST(UpstreamChoice, RefusesRowsOfWhichSomeLackAnOutput) {
  auto asked = question({2, 2}, {"S0* <- S0*"}, {"S0,S0"});
  asked.rows[0].outputs[0] = std::nullopt;
  asked.rows.push_back(row("S1* <- S1*"));
  EXPECT_EQ(to_text(upstream_choice(asked)), "none");
}

TEST(UpstreamChoice, TakesAStridedShardAsItIs) {
  auto asked = question({2}, {"S0* <- S0*,S0*"}, {"R", "R"});
  asked.operands[0].source = {{Placement::shard(0, 3)}, {{0}}};
  asked.operands[1].source = asked.operands[0].source;
  asked.split_factors = {3};
  EXPECT_EQ(to_text(upstream_choice(asked)), "_S(0, 3) <- _S(0, 3),_S(0, 3)");
}

TEST(UpstreamPlans, ChargeNothingForAStridedShard) {
  const Mesh mesh{{2}, {}, {}};
  const auto rings = ring_axes(mesh);
  UpstreamPlans plans(tensor({24, 24}), {{Placement::shard(0, 3)}, {{0}}}, {}, rings);
  EXPECT_EQ(plans.cost_to(parse_placements("R")), 0);
}

TEST(UpstreamPlans, ChargeWhatAGreedyPlanCostsForAGather) {
  const Mesh mesh{{2, 2}, {}, {}};
  const auto rings = ring_axes(mesh);
  UpstreamPlans plans(tensor({24, 24}), {parse_placements("S0,S0"), {{1, 0}}}, {}, rings);
  EXPECT_DOUBLE_EQ(plans.cost_to(parse_placements("R,R")),
                   dtensor_cost(layout("S0,S0"), layout("R,R"), 24 * 24 * 4, rings));
}

// A reference that writes out the full product of rows without any_shard().
class Product {
 public:
  explicit Product(const UpstreamQuestion& asked) : asked_(asked), rings_(ring_axes(asked.mesh)) {
    const auto is_replicate = [](const Placement& placement) { return placement.is_replicate(); };
    rows_ = asked.rows;
    const auto replicates = [&](const Row& one) {
      return is_replicate(*one.outputs[0]) && std::ranges::all_of(one.inputs, is_replicate);
    };
    if (std::ranges::none_of(rows_, replicates)) {
      Row replicated;
      replicated.inputs.resize(asked.operands.size());
      replicated.outputs = {Placement::replicate()};
      rows_.insert(rows_.begin(), replicated);
    }
  }

  std::string choice() {
    visit({});
    const auto& chosen = unmoved_.empty() ? cheapest_ : unmoved_;
    return chosen.empty() ? "none" : to_text(UpstreamChoice{chosen, {}});
  }

 private:
  void visit(const std::vector<Row>& chosen) {
    if (chosen.size() < asked_.mesh.sizes.size()) {
      for (const auto& next : rows_) {
        auto longer = chosen;
        longer.push_back(next);
        visit(longer);
      }
      return;
    }
    double sum = 0;
    bool is_pinned = true;
    for (size_t i = 0; i < asked_.operands.size(); ++i) {
      std::vector<Placement> target;
      target.reserve(chosen.size());
      for (const auto& one : chosen) {
        target.push_back(one.inputs[i]);
      }
      if (!is_legal(target, asked_.operands[i].meta.shape)) {
        return;
      }
      is_pinned = is_pinned && target == asked_.operands[i].source.placements;
      sum += dtensor_cost(asked_.operands[i].source, {target, default_shard_order(target)}, bytes(i), rings_);
    }
    std::vector<Placement> output;
    output.reserve(chosen.size());
    for (const auto& one : chosen) {
      output.push_back(*one.outputs[0]);
    }
    if (!is_legal(output, {})) {
      return;
    }
    unmoved_ = is_pinned && sum == 0 ? chosen : unmoved_;
    if (cheapest_.empty() || sum < least_) {
      least_ = sum;
      cheapest_ = chosen;
    }
  }

  double bytes(size_t input) const {
    const auto& shape = asked_.operands[input].meta.shape;
    return 4.0 *
           static_cast<double>(std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()));
  }

  bool is_legal(const std::vector<Placement>& placements, const std::vector<int64_t>& shape) const {
    auto left = shape;
    for (size_t axis = 0; axis < placements.size(); ++axis) {
      for (const auto& other : placements) {
        if (placements[axis].is_partial() && other.is_partial() && !commute(placements[axis].op, other.op)) {
          return false;
        }
      }
      if (placements[axis].is_shard() && !shape.empty()) {
        auto& size = left[placements[axis].dim];
        size /= asked_.mesh.sizes[axis];
        if (size == 0) {
          return false;
        }
      }
    }
    return true;
  }

  const UpstreamQuestion& asked_;
  const std::vector<RingAxis> rings_;
  std::vector<Row> rows_;
  std::vector<Row> unmoved_;
  std::vector<Row> cheapest_;
  double least_ = 0;
};

class Drawn : public ::testing::TestWithParam<int> {};

TEST_P(Drawn, IsTheChoiceOfTheFullProduct) {
  std::mt19937 random(GetParam());
  const auto one_of = [&](const std::vector<std::string>& words) { return words[random() % words.size()]; };
  const std::vector<std::string> words{"R", "S0", "S1", "P", "P(max)", "P(avg)"};
  std::vector<std::string> rows;
  rows.reserve(5);
  for (int i = 0; i < 5; ++i) {
    rows.push_back(one_of(words) + " <- " + one_of(words) + "," + one_of(words));
  }
  const std::vector<int64_t> mesh(1 + random() % 3, 2 + static_cast<int64_t>(random() % 2));
  std::vector<std::string> sources;
  for (int i = 0; i < 2; ++i) {
    std::string source;
    for (size_t axis = 0; axis < mesh.size(); ++axis) {
      source += (axis == 0 ? "" : ",") + one_of(words);
    }
    sources.push_back(source);
  }
  const auto size = static_cast<int64_t>(1 + random() % 24);
  const auto asked = question(mesh, rows, sources, {size, 24});
  EXPECT_EQ(to_text(upstream_choice(asked)), Product(asked).choice());
}

INSTANTIATE_TEST_SUITE_P(Questions, Drawn, ::testing::Range(0, 400));

}  // namespace
}  // namespace funcol::upstream_search_test
