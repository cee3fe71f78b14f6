#include "async/buffer_release.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "support/child_process.h"
#include "support/fake_work.h"

namespace funcol::buffer_release_test {
namespace {

using test::completed_work;
using test::FakeWork;
constexpr auto kOp = "held";

// Reads `input` and writes a tensor of six numbers.
StartedCollective reading(const at::Tensor& input, c10::intrusive_ptr<c10d::Work> work) {
  StartedCollective start;
  start.op = kOp;
  start.work = std::move(work);
  start.buffers = {input};
  start.outputs = {at::zeros({2, 3})};
  return start;
}

at::Tensor large() { return at::ones({4096}); }

bool comes_true(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

TEST(BufferRelease, HappensByItselfOnceTheWorkHasCompleted) {
  const auto input = large();
  auto work = c10::make_intrusive<FakeWork>();
  const auto collective = make_pending_collective(reading(input, work));
  EXPECT_TRUE(comes_true([&] { return work->num_asked > 1; }));
  EXPECT_EQ(input.use_count(), 2) << "the Work still reads it";
  work->completed = true;
  EXPECT_TRUE(comes_true([&] { return input.use_count() == 1 && work.use_count() == 1; }));
  EXPECT_EQ(work->num_waits, 1);
}

TEST(BufferRelease, HappensWhenAnotherCollectiveStarts) {
  const auto input = large();
  const auto work = completed_work();
  const auto first = make_pending_collective(reading(input, work));
  const auto second = make_pending_collective(reading(large(), c10::make_intrusive<FakeWork>()));
  EXPECT_TRUE(comes_true([&] { return input.use_count() == 1; }));
}

TEST(BufferRelease, LeavesTheCollectiveUnwaitedUntilFirstUse) {
  const auto input = large();
  const auto work = completed_work();
  const auto num_before = unwaited_collectives()[kOp];
  const auto collective = make_pending_collective(reading(input, work));
  ASSERT_TRUE(comes_true([&] { return input.use_count() == 1; }));
  EXPECT_FALSE(collective->is_settled());
  EXPECT_EQ(unwaited_collectives()[kOp], num_before + 1);
  collective->settle();
  EXPECT_TRUE(collective->is_settled());
  EXPECT_EQ(unwaited_collectives()[kOp], num_before);
  EXPECT_EQ(work->num_waits, 1);
}

TEST(BufferRelease, ComesAfterTheEpilogueWhichRunsOnce) {
  const auto input = large();
  const auto work = completed_work();
  int num_epilogues = 0;
  auto start = reading(input, work);
  start.epilogue = [&](const StartedCollective& finished) {
    EXPECT_EQ(finished.buffers.size(), 1);
    ++num_epilogues;
  };
  const auto collective = make_pending_collective(std::move(start));
  ASSERT_TRUE(comes_true([&] { return input.use_count() == 1; }));
  collective->settle();
  EXPECT_EQ(num_epilogues, 1);
}

TEST(BufferRelease, OfAFailedWorkKeepsTheErrorForEachUse) {
  const auto input = large();
  const auto work = completed_work([] { throw std::runtime_error("peer is gone"); });
  const auto collective = make_pending_collective(reading(input, work));
  ASSERT_TRUE(comes_true([&] { return input.use_count() == 1; }));
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(collective->settle(), c10::DistBackendError);
  }
}

TEST(BufferRelease, DoesNotHideADestroyedGroup) {
  const auto input = large();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  const auto work = completed_work();
  auto start = reading(input, work);
  start.group = group;
  const auto collective = make_pending_collective(std::move(start));
  ASSERT_TRUE(comes_true([&] { return input.use_count() == 1; }));
  group.reset();
  for (int i = 0; i < 2; ++i) {
    try {
      collective->settle();
      ADD_FAILURE() << "its result was given out";
    } catch (const c10::DistBackendError& error) {
      EXPECT_PRED_FORMAT2(testing::IsSubstring, "was destroyed", error.what_without_backtrace());
      EXPECT_PRED_FORMAT2(testing::IsSubstring, "funcol::held", error.what_without_backtrace());
    }
  }
}

TEST(BufferRelease, SkipsSmallBuffers) {
  const auto input = at::ones({8});
  const auto work = completed_work();
  const auto collective = make_pending_collective(reading(input, work));
  make_pending_collective(reading(large(), c10::make_intrusive<FakeWork>()));
  EXPECT_EQ(work->num_waits, 0);
}

TEST(BufferRelease, HappensInAForkedChildToo) {
  const auto before =
      make_pending_collective(reading(large(), c10::make_intrusive<FakeWork>()));  // there is a thread
  EXPECT_TRUE(test::holds_in_child([] {
    const auto input = large();
    const auto collective = make_pending_collective(reading(input, completed_work()));
    return comes_true([&] { return input.use_count() == 1; });
  }));
}

TEST(GradientCollectives, WaitForEarlierOnesThatHoldMuch) {
  const auto much = at::ones({2 << 20});
  auto work = c10::make_intrusive<FakeWork>();
  const auto start_one = [](StartedCollective start) {
    const GradientCollectives gradient;
    return make_pending_collective(std::move(start));
  };
  const auto first = start_one(reading(much, work));
  EXPECT_EQ(work->num_waits, 0);
  const auto second = start_one(reading(large(), c10::make_intrusive<FakeWork>()));
  EXPECT_EQ(work->num_waits, 1);
  EXPECT_EQ(much.use_count(), 1);
  EXPECT_FALSE(first->is_settled());
}

TEST(GradientCollectives, DoNotWaitForThoseOfTheForwardPass) {
  auto work = c10::make_intrusive<FakeWork>();
  const auto forward = make_pending_collective(reading(at::ones({2 << 20}), work));
  const GradientCollectives gradient;
  EXPECT_EQ(work->num_waits, 0);
}

TEST(GradientCollectives, ReadACopyOfWhatOthersReach) {
  const auto make = [] { return std::vector<at::Tensor>{at::ones({4})}; };
  const auto alone = make();
  EXPECT_TRUE(GradientCollectives::unshared(alone[0]).is_same(alone[0]));
  const auto held = make();
  const auto holder = held[0];
  EXPECT_FALSE(GradientCollectives::unshared(held[0]).is_alias_of(held[0]));
  const auto viewed = make();
  const auto view = viewed[0].view({2, 2});
  EXPECT_FALSE(GradientCollectives::unshared(viewed[0]).is_alias_of(viewed[0]));
}

}  // namespace
}  // namespace funcol::buffer_release_test
