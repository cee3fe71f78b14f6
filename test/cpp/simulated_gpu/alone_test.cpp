// One rank of NCCL whose peers do not exist and are taken to send what it sends.
#include <gtest/gtest.h>

#include <string>

#include "simulated_gpu/programs.h"

namespace simulated_gpu::alone_test {
namespace {

void expect_right_values(const std::string& program) {
  Schedule schedule;
  schedule.alone = true;
  const Outcome outcome = run_program(program, schedule);
  EXPECT_EQ(outcome.status, 0) << outcome.errors;
}

TEST(Alone, AllReduceSumsTheValueOnceARank) { expect_right_values("alone: all_reduce"); }

TEST(Alone, AllGatherRepeatsTheValue) { expect_right_values("alone: all_gather"); }

TEST(Alone, ABroadcastOfAnotherRankGivesZeros) { expect_right_values("alone: broadcast of another rank"); }

TEST(Alone, ASplitIsRefusedAsItsRanksAreNotKnown) { expect_right_values("alone: split"); }

}  // namespace
}  // namespace simulated_gpu::alone_test
