// Programs that miss an order are found, and those that have it never are.
#include <gtest/gtest.h>

#include <string>

#include "simulated_gpu/programs.h"

namespace simulated_gpu::races_test {
namespace {

using testing::Values;

constexpr int kAfterReports = 66;
constexpr int kValuesWrong = 1;

class RightProgram : public testing::TestWithParam<std::string> {};

TEST_P(RightProgram, IsRightInAllOrders) {
  for (const std::string order : {"random", "last", "lazy", "first"}) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      const Outcome outcome = run_program(GetParam(), {seed, order});
      EXPECT_EQ(outcome.status, 0) << "seed " << seed << ", order " << order << ": " << outcome.errors;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Programs, RightProgram,
                         Values("read after a wait", "overwrite after a wait", "block again after its event",
                                "host after a synchronize", "graph with a wait", "read after a query",
                                "host writes after a copy", "copy through pinned memory"));

// Accesses are compared by what orders them, so that one run is enough, whatever its order.
class RacyProgram : public testing::TestWithParam<std::string> {};

TEST_P(RacyProgram, IsReportedInTheFirstRun) {
  for (const std::string order : {"random", "last", "lazy", "first"}) {
    const Outcome outcome = run_program(GetParam(), {0, order});
    EXPECT_TRUE(outcome.status == kAfterReports || outcome.status == kValuesWrong) << outcome.status;
    EXPECT_NE(outcome.errors.find("race: nothing orders these two operations"), std::string::npos);
    EXPECT_NE(outcome.errors.find("tools/simulated_gpu --seed 0 --order " + order), std::string::npos);
  }
}

INSTANTIATE_TEST_SUITE_P(Programs, RacyProgram,
                         Values("read without a wait", "overwrite without a wait", "block again at once",
                                "graph without a wait", "read after an onlooker's query"));

// Without that comparison, their values are wrong in some order.
class WrongProgram : public testing::TestWithParam<std::string> {};

TEST_P(WrongProgram, HasWrongValuesWithinTenSeeds) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    if (run_program(GetParam(), {seed, "random", false}).status == kValuesWrong) {
      return;
    }
  }
  ADD_FAILURE() << "the values were right";
}

INSTANTIATE_TEST_SUITE_P(Programs, WrongProgram,
                         Values("read without a wait", "overwrite without a wait", "block again at once",
                                "host without a synchronize", "graph without a wait"));

TEST(Races, AReportNamesBothOperationsAndTheirKind) {
  const std::string errors = run_program("read without a wait", {}).errors;
  EXPECT_NE(errors.find("a read by add"), std::string::npos) << errors;
  EXPECT_NE(errors.find("a write by add"), std::string::npos) << errors;
  EXPECT_NE(errors.find("256 bytes"), std::string::npos) << errors;
}

TEST(Races, AnOnlookerThatSawTheEndMayHaveToldTheProgramAfterAWhile) {
  const Outcome outcome = run_program("read long after an onlooker's query", {0, "first"});
  EXPECT_EQ(outcome.errors, "");
  EXPECT_EQ(outcome.status, 0);
}

TEST(Races, AWriteOfTheHostBeforeACopyHasReadIsReportedInAllOrders) {
  for (const std::string order : {"random", "last", "lazy", "first"}) {
    const Outcome outcome = run_program("host writes before a copy", {0, order});
    EXPECT_EQ(outcome.status, kValuesWrong);
    EXPECT_NE(outcome.errors.find("race: pinned memory was written before a queued copy had read it, within "
                                  "256 bytes"),
              std::string::npos)
        << outcome.errors;
    EXPECT_NE(outcome.errors.find("a read by a copy (operation 2 of stream"), std::string::npos)
        << outcome.errors;
  }
}

TEST(Races, MemoryHandedOutTooEarlyIsNamedSo) {
  EXPECT_NE(run_program("block again at once", {}).errors.find("record_stream() or a wait is missing"),
            std::string::npos);
}

TEST(Faults, HostCodeThatReadsDeviceMemoryEndsWithTheAllocationAndItsStack) {
  const Outcome outcome = run_program("host reads device memory", {});
  EXPECT_EQ(outcome.status, -SIGSEGV);
  EXPECT_NE(outcome.errors.find("host code reads or writes device memory"), std::string::npos)
      << outcome.errors;
  EXPECT_NE(outcome.errors.find("0 bytes into the 256 bytes"), std::string::npos) << outcome.errors;
  EXPECT_NE(outcome.errors.find("test_simulated_gpu("), std::string::npos) << outcome.errors;
}

TEST(Faults, AnAccessBehindAnAllocationEndsTheProcess) {
  EXPECT_EQ(run_program("host reads behind an allocation", {}).status, -SIGSEGV);
}

TEST(Faults, AFailedOperationIsReportedByEveryLaterCall) {
  const Outcome outcome = run_program("work fails", {});
  EXPECT_EQ(outcome.status, kAfterReports);
  EXPECT_NE(outcome.errors.find("bad kernel on stream 0 failed: on purpose"), std::string::npos)
      << outcome.errors;
}

}  // namespace
}  // namespace simulated_gpu::races_test
