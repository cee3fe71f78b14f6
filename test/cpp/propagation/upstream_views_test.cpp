#include "propagation/upstream_views.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "layout/placement.h"
#include "propagation/calls.h"

namespace funcol::upstream_views_test {
namespace {

using test::CallOf;
using test::Shape;
using test::tensor;

Mesh mesh_of(std::vector<int64_t> sizes) {
  Mesh mesh;
  mesh.sizes = std::move(sizes);
  return mesh;
}

// The placements of the result as text; "" where PyTorch has to be asked.
std::string placements_of(CallOf call, const Shape& result, const std::string& source, const Mesh& mesh) {
  const auto placements = parse_placements(source);
  const auto found = upstream_view(call.gives(result), {placements, default_shard_order(placements)}, mesh);
  std::string text;
  for (const auto& placement : found.value_or(std::vector<Placement>{})) {
    text += to_string(placement);
  }
  return text;
}

std::string viewed(const Shape& from, const Shape& to, const std::string& source,
                   const Mesh& mesh = mesh_of({2, 2})) {
  return placements_of(CallOf("aten::view").with("self", tensor(from)), to, source, mesh);
}

TEST(UpstreamView, KeepsDimsOfTheSameSize) {
  EXPECT_EQ(viewed({8, 6}, {8, 2, 3}, "S0,R"), "S(0)R");
  EXPECT_EQ(viewed({7, 6}, {1, 7, 6}, "S0,S1"), "S(1)S(2)");
}

TEST(UpstreamView, KeepsTheFirstDimOfASplitAndOfAFlattening) {
  EXPECT_EQ(viewed({8, 6}, {4, 2, 6}, "S0,S0"), "S(0)S(0)");
  EXPECT_EQ(viewed({8, 1, 6}, {48}, "S0,P"), "S(0)P(sum)");
}

TEST(UpstreamView, LeavesOthersToPyTorch) {
  EXPECT_EQ(viewed({8, 5}, {40}, "S1,R"), "");        // uneven
  EXPECT_EQ(viewed({8, 6}, {2, 4, 6}, "S0,S0"), "");  // 4 shards of 2
  EXPECT_EQ(viewed({6, 8}, {48}, "S0,S0"), "");       // uneven
  EXPECT_EQ(viewed({6, 4}, {4, 6}, "S0,R"), "");      // dims flattened and split
  EXPECT_EQ(viewed({1, 6}, {6}, "S0,R"), "");         // no such dim in the result
  EXPECT_EQ(viewed({0, 6}, {0}, "S0,R"), "");
}

TEST(UpstreamView, MakesStridedShardsAndTakesThemApart) {
  EXPECT_EQ(viewed({8, 6}, {48}, "S1,R"), "_S(0, 8)R");
  EXPECT_EQ(viewed({48}, {8, 6}, "_S(0,8),R"), "S(1)R");
  EXPECT_EQ(viewed({8, 6, 5}, {48, 5}, "S0,S1"), "S(0)_S(0, 4)");
  EXPECT_EQ(viewed({48, 5}, {8, 6, 5}, "S0,_S(0,4)"), "S(0)S(1)");
  EXPECT_EQ(viewed({48, 5}, {1, 48, 5}, "S0,_S(0,4)"), "S(1)_S(1, 4)");
  EXPECT_EQ(viewed({48}, {4, 12}, "_S(0,8),R"), "");                   // other pieces than those of the split
  EXPECT_EQ(viewed({48}, {6, 8}, "S0,_S(0,3)", mesh_of({2, 4})), "");  // refused, though right
}

TEST(UpstreamView, PermutesAndExpandsDims) {
  const auto mesh = mesh_of({2, 2});
  const auto x = tensor({4, 6});
  EXPECT_EQ(placements_of(CallOf("aten::permute").with("self", x).with("dims", test::integers({-1, 0})),
                          {6, 4}, "S0,R", mesh),
            "S(1)R");
  EXPECT_EQ(
      placements_of(
          CallOf("aten::transpose.int").with("self", x).with("dim0", int64_t{0}).with("dim1", int64_t{-1}),
          {6, 4}, "S0,S1", mesh),
      "S(1)S(0)");
  EXPECT_EQ(placements_of(CallOf("aten::permute").with("self", x).with("dims", test::integers({-1, 0})),
                          {6, 4}, "S1,_S(0,2)", mesh),
            "S(0)_S(1, 2)");
  EXPECT_EQ(placements_of(CallOf("aten::unsqueeze").with("self", x).with("dim", int64_t{0}), {1, 4, 6},
                          "S0,R", mesh),
            "S(1)R");
  EXPECT_EQ(placements_of(CallOf("aten::expand").with("self", x), {3, 4, 6}, "S0,S1", mesh), "S(1)S(2)");
  EXPECT_EQ(placements_of(CallOf("aten::expand").with("self", tensor({1, 6})), {4, 6}, "S0,R", mesh), "");
}

TEST(UpstreamView, IsNoOtherOperator) {
  EXPECT_EQ(placements_of(CallOf("aten::neg").with("self", tensor({4})), {4}, "S0", mesh_of({2})), "");
}

}  // namespace
}  // namespace funcol::upstream_views_test
