#include "planner/search_pool.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "planner/tasks.h"
#include "support/refuses.h"

namespace funcol::search_pool_test {
namespace {

const Mesh kMesh{{2, 2}, {}, {}};

Layout layout(const std::string& placements) { return test::layout_of({placements}, kMesh, 2); }

std::unique_ptr<ShortestPaths> take(SearchPool& source, int64_t size, const std::string& from = "S0,R") {
  return source.take({size, 4}, 4, layout(from), vocabulary_of(parse_placements("S0,S1")));
}

class CostsOfOneMesh : public ::testing::Test {
 protected:
  SearchPool source_{kMesh, StepCounts{}, 2};
};

TEST_F(CostsOfOneMesh, RememberWhatIsGivenBack) {
  auto paths = take(source_, 8);
  const ShortestPaths* const first = paths.get();
  source_.give_back(std::move(paths));
  EXPECT_EQ(take(source_, 8).get(), first);
}

TEST_F(CostsOfOneMesh, AreLentToOneAtATime) {
  const auto first = take(source_, 8);
  EXPECT_NE(take(source_, 8).get(), first.get());
}

TEST_F(CostsOfOneMesh, KeepAsManyAsWereAskedFor) {
  for (int64_t size = 1; size < 5; ++size) {
    source_.give_back(take(source_, size));
  }
  EXPECT_EQ(source_.num_idle(), 2);
}

struct Tensor {
  std::vector<int64_t> shape;
  int64_t itemsize;
  std::string from;
  std::string vocabulary;
};

class OtherTensor : public CostsOfOneMesh, public ::testing::WithParamInterface<Tensor> {};

TEST_P(OtherTensor, HasCostsOfItsOwn) {
  auto paths = take(source_, 8);
  source_.give_back(std::move(paths));
  const auto& [shape, itemsize, from, vocabulary] = GetParam();
  source_.give_back(source_.take(shape, itemsize, layout(from), vocabulary_of(parse_placements(vocabulary))));
  EXPECT_EQ(source_.num_idle(), 2);
}

INSTANTIATE_TEST_SUITE_P(Parts, OtherTensor,
                         ::testing::Values(Tensor{{8, 5}, 4, "S0,R", "S0,S1"},
                                           Tensor{{8, 4}, 2, "S0,R", "S0,S1"},
                                           Tensor{{8, 4}, 4, "S0,P", "S0,S1"},
                                           Tensor{{8, 4}, 4, "S0,R", "S0,S1,P"}));

TEST_F(CostsOfOneMesh, MayBeAskedForBySeveralThreads) {
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([this] {
      for (int round = 0; round < 200; ++round) {
        auto paths = take(source_, 8);
        EXPECT_EQ(paths->cost_to(layout("R,R")), 2);
        source_.give_back(std::move(paths));
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

TEST(SearchPool, IsPricedInMicrosecondsUnlessToldOtherwise) {
  SearchPool source(kMesh);
  const Costs costs(default_alpha_beta(kMesh), kMesh);
  ShortestPaths expected(kMesh, costs, {8, 4}, 4, layout("S0,R"), {});
  EXPECT_EQ(take(source, 8)->cost_to(layout("R,R")), expected.cost_to(layout("R,R")));
}

TEST(SearchPool, OfAModelOfAnotherMeshIsRefused) {
  EXPECT_TRUE(test::refuses(
      [] {
        SearchPool(kMesh, default_alpha_beta({{2}, {}, {}}));
      },
      {"AlphaBeta: ", "1 axes for a mesh of 2 axes"}));
}

TEST(Vocabulary, NamesEachPlacementOnceInOneOrder) {
  EXPECT_EQ(vocabulary_of(parse_placements("P,S1,R,S0,S1")), vocabulary_of(parse_placements("S0,S1,P")));
}

TEST(Vocabulary, LeavesOutMasks) {
  EXPECT_TRUE(vocabulary_of({Placement::partial(PartialOp::kSum, 3)}).empty());
}

}  // namespace
}  // namespace funcol::search_pool_test
