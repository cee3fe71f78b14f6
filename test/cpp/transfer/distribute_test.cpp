#include "transfer/distribute.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "support/refuses.h"
#include "transfer/thread_mesh.h"

namespace funcol::distribute_test {
namespace {

using test::refuses;
using test::ThreadMesh;

Distribution distribution(const Mesh& mesh, const std::string& placements, const Coordinate& coordinate,
                          std::optional<int64_t> source = 0) {
  return {parse_placements(placements), mesh, coordinate, source};
}

std::vector<AxisGroup> groups_of_axes(const AxisGroups& groups, const Mesh& mesh) {
  std::vector<AxisGroup> of_axes;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    of_axes.push_back(groups.at(axis_set(axis)));
  }
  return of_axes;
}

// The results on all ranks. Those at index `source` of all axes have `whole`, the others zeros.
std::vector<at::Tensor> distributed(const ThreadMesh& ranks, const at::Tensor& whole,
                                    const std::string& placements, int64_t source_index = 0,
                                    int64_t source = 0) {
  const auto results = ranks.run([&](const Coordinate& coordinate, const AxisGroups& groups) {
    const bool has_whole = coordinate == Coordinate(coordinate.size(), source_index);
    const auto how = distribution(ranks.mesh(), placements, coordinate, source);
    check(how, whole);
    return std::vector{distribute(has_whole ? whole.clone() : at::zeros_like(whole), how,
                                  groups_of_axes(groups, ranks.mesh()))};
  });
  std::vector<at::Tensor> firsts;
  for (const auto& result : results) {
    firsts.push_back(result[0]);
  }
  return firsts;
}

// Sizes of the mesh, placements, shape.
using Case = std::tuple<std::vector<int64_t>, std::string, std::vector<int64_t>>;

class Distributions : public testing::TestWithParam<Case> {};

TEST_P(Distributions, BringEveryRankItsShard) {
  const auto& [sizes, placements, shape] = GetParam();
  const ThreadMesh ranks({sizes, {}, {}});
  const auto whole = at::arange(shape[0] * shape[1], at::kFloat).view(shape);
  const auto layout = make_layout("test", parse_placements(placements), {}, ranks.mesh(), 2);
  const auto results = distributed(ranks, whole, placements);
  for (size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_TRUE(at::equal(results[rank], test::shard(whole, layout, ranks.mesh(), ranks.coordinates()[rank])))
        << "rank " << rank;
  }
}

const std::vector<std::vector<int64_t>> kShapes{{8, 4}, {5, 3}, {1, 2}, {0, 4}};

INSTANTIATE_TEST_SUITE_P(OneAxis, Distributions,
                         testing::Combine(testing::Values(std::vector<int64_t>{1}, std::vector<int64_t>{3}),
                                          testing::Values("R", "S0", "S1", "_S(0, 2)"),
                                          testing::ValuesIn(kShapes)));
INSTANTIATE_TEST_SUITE_P(TwoAxes, Distributions,
                         testing::Combine(testing::Values(std::vector<int64_t>{2, 2}),
                                          testing::Values("R,R", "R,S0", "S1,R", "S0,S0", "S0,S1"),
                                          testing::ValuesIn(kShapes)));

TEST(Distribute, PartsOfASumAddUpToTheWhole) {
  const auto whole = at::arange(6, at::kFloat);
  const auto results = distributed(ThreadMesh({{3}, {}, {}}), whole, "P");
  EXPECT_TRUE(at::allclose(results[0] + results[1] + results[2], whole));
}

TEST(Distribute, PartsOfAMaximumAreTheWhole) {
  const auto whole = at::arange(6, at::kFloat);
  EXPECT_TRUE(at::equal(distributed(ThreadMesh({{2}, {}, {}}), whole, "P(max)")[1], whole));
}

TEST(Distribute, SendsFromAnyRank) {
  const auto whole = at::arange(5, at::kFloat);
  const auto results = distributed(ThreadMesh({{2}, {}, {}}), whole, "S0", /*source_index=*/1, /*source=*/1);
  EXPECT_TRUE(at::equal(results[0], whole.narrow(0, 0, 3)));
  EXPECT_TRUE(at::equal(results[1], whole.narrow(0, 3, 2)));
}

TEST(Distribute, BringsShardsToTheirPlacesOnAnAxisInAnotherOrderThanItsGroup) {
  const auto whole = at::arange(5, at::kFloat);
  const ThreadMesh ranks({{3}, {}, {}}, {{0b1, {2, 0, 1}}});
  const auto results = distributed(ranks, whole, "S0", /*source_index=*/2, /*source=*/0);
  EXPECT_TRUE(at::equal(at::cat(results), whole));
}

TEST(Distribute, SendsShardsAndNoWholeTensorsToReplicas) {
  const ThreadMesh ranks({{2, 4}, {}, {}});
  distributed(ranks, at::ones({8, 4}), "R,S0");
  // Both rows of the mesh scatter 8 elements a rank; then 4 ranks broadcast theirs.
  EXPECT_EQ(ranks.num_elements(), 2 * 4 * 8 + 4 * 8);
}

TEST(Distribute, WithoutASourceCutsTheTensorThatEveryRankHas) {
  const Mesh mesh{{2, 2}, {}, {}};
  const auto whole = at::arange(12).view({4, 3});
  const auto local = distribute(whole, distribution(mesh, "S0,S1", {1, 0}, std::nullopt), {});
  EXPECT_TRUE(at::equal(local, whole.narrow(0, 2, 2).narrow(1, 0, 2)));
  EXPECT_FALSE(local.is_alias_of(whole));
}

TEST(Distribute, OfAContiguousReplicaIsTheTensorItself) {
  const auto whole = at::ones({4, 3});
  const Mesh mesh{{2}, {}, {}};
  EXPECT_TRUE(distribute(whole, distribution(mesh, "R", {1}, std::nullopt), {}).is_same(whole));
  EXPECT_TRUE(distribute(whole.t(), distribution(mesh, "R", {1}, std::nullopt), {}).is_contiguous());
}

struct Refusal {
  std::string placements;
  int64_t source;
  std::string part;
};

class RefusedDistributions : public testing::TestWithParam<Refusal> {};

TEST_P(RefusedDistributions, NameWhatIsWrong) {
  const auto how = distribution({{2}, {"tp"}, {}}, GetParam().placements, {0}, GetParam().source);
  EXPECT_TRUE(refuses<c10::ValueError>(
      [&] {
        check(how, at::ones({4, 3}));
      },
      {"funcol::distribute_tensor", "mesh axis tp", GetParam().part}));
}

INSTANTIATE_TEST_SUITE_P(Reasons, RefusedDistributions,
                         testing::Values(Refusal{"S2", 0, "S(2)"}, Refusal{"P(product)", 0, "P(product)"},
                                         Refusal{"S0", 2, "src_data_rank is 2"},
                                         Refusal{"R", -1, "src_data_rank is -1"}));

}  // namespace
}  // namespace funcol::distribute_test
