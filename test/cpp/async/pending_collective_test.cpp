#include "async/pending_collective.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "comm/orphaned_works.h"
#include "support/child_process.h"
#include "support/fake_work.h"
#include "support/noted_blocking.h"

namespace funcol::pending_collective_test {
namespace {

using test::completed_work;
using test::FakeWork;
using testing::IsSubstring;

c10::intrusive_ptr<PendingCollective> pending(c10::intrusive_ptr<c10d::Work> work,
                                              std::function<void(const StartedCollective&)> epilogue = {}) {
  StartedCollective start;
  start.op = "all_reduce";
  start.group = GroupRef("dp");
  start.work = std::move(work);
  start.outputs = {at::zeros({2, 3})};
  start.epilogue = std::move(epilogue);
  return c10::make_intrusive<PendingCollective>(std::move(start));
}

std::string error_of(PendingCollective& collective) {
  try {
    collective.settle();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

TEST(PendingCollective, WaitsOnceHoweverOftenItIsSettled) {
  auto work = c10::make_intrusive<FakeWork>();
  auto collective = pending(work);
  EXPECT_FALSE(collective->is_settled());
  collective->settle();
  collective->settle();
  EXPECT_TRUE(collective->is_settled());
  EXPECT_EQ(work->num_waits, 1);
}

TEST(PendingCollective, IsWaitedForWhereThatMayBlock) {
  const test::NotedBlocking noted;
  pending(c10::make_intrusive<FakeWork>([&] { EXPECT_TRUE(noted.is_inside); }))->settle();
  EXPECT_EQ(noted.num_runs, 1);
}

TEST(PendingCollective, ThatIsOverIsSettledWithoutBlocking) {
  const test::NotedBlocking noted;
  const auto work = completed_work();
  int num_epilogues = 0;
  auto collective = pending(work, [&](const auto&) { ++num_epilogues; });
  collective->settle();
  EXPECT_TRUE(collective->is_settled());
  EXPECT_EQ(noted.num_runs, 0);
  EXPECT_EQ(work->num_waits, 1);
  EXPECT_EQ(num_epilogues, 1);
}

TEST(PendingCollective, WaitsOnceWhenManyThreadsSettleAtOnce) {
  auto work = c10::make_intrusive<FakeWork>([] { std::this_thread::yield(); });
  auto collective = pending(work);
  std::vector<std::thread> threads;
  threads.reserve(8);
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] { collective->settle(); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(work->num_waits, 1);
}

TEST(PendingCollective, RunsTheEpilogueOnceAfterTheWork) {
  std::vector<std::string> order;
  auto collective = pending(c10::make_intrusive<FakeWork>([&] { order.emplace_back("work"); }),
                            [&](const auto&) { order.emplace_back("epilogue"); });
  collective->settle();
  collective->settle();
  EXPECT_EQ(order, (std::vector<std::string>{"work", "epilogue"}));
}

TEST(PendingCollective, WithoutAWorkSettlesAtOnce) {
  auto collective = pending({});
  collective->settle();
  EXPECT_TRUE(collective->is_settled());
}

TEST(PendingCollective, RaisesTheSameErrorAtEachSettleAndNeverWaitsAgain) {
  auto work = c10::make_intrusive<FakeWork>([] { throw std::runtime_error("peer is gone"); });
  auto collective = pending(work);
  for (int i = 0; i < 3; ++i) {
    const auto error = error_of(*collective);
    EXPECT_PRED_FORMAT2(IsSubstring, "peer is gone", error);
    EXPECT_PRED_FORMAT2(IsSubstring, "funcol::all_reduce", error);
    EXPECT_PRED_FORMAT2(IsSubstring, "'dp'", error);
    EXPECT_PRED_FORMAT2(IsSubstring, "[2, 3]", error);
    EXPECT_FALSE(collective->is_settled());
  }
  EXPECT_EQ(work->num_waits, 1);
}

TEST(PendingCollective, KeepsTheTypeOfPyTorchsErrors) {
  auto collective = pending(c10::make_intrusive<FakeWork>([] { TORCH_CHECK_VALUE(false, "bad value"); }));
  EXPECT_THROW(collective->settle(), c10::ValueError);
  EXPECT_THROW(collective->settle(), c10::ValueError);
}

TEST(PendingCollective, AFailedEpilogueFailsTheCollective) {
  auto collective =
      pending(c10::make_intrusive<FakeWork>(), [](const auto&) { throw std::runtime_error("no memory"); });
  EXPECT_PRED_FORMAT2(IsSubstring, "no memory", error_of(*collective));
  EXPECT_FALSE(collective->is_settled());
}

TEST(PendingCollective, AFailedWorkKeepsTheEpilogueFromRunning) {
  bool has_run = false;
  auto collective = pending(c10::make_intrusive<FakeWork>([] { throw std::runtime_error("peer is gone"); }),
                            [&](const auto&) { has_run = true; });
  for (int i = 0; i < 2; ++i) {
    EXPECT_PRED_FORMAT2(IsSubstring, "peer is gone", error_of(*collective));
  }
  EXPECT_FALSE(has_run);
}

TEST(PendingCollective, AnAbortedWorkIsAnError) {
  auto work = c10::make_intrusive<FakeWork>();
  work->aborted = true;
  EXPECT_PRED_FORMAT2(IsSubstring, "aborted", error_of(*pending(work)));
}

TEST(PendingCollective, ThatDiesUnsettledLeavesItsWorkRunningAndBlocksNobody) {
  auto work = c10::make_intrusive<FakeWork>();
  const auto orphans_before = sweep_orphans();
  pending(work).reset();
  EXPECT_EQ(sweep_orphans(), orphans_before + 1);
  EXPECT_EQ(work->num_waits, 0);
  EXPECT_EQ(work.use_count(), 2);
  work->completed = true;
  EXPECT_EQ(sweep_orphans(), orphans_before);
  EXPECT_EQ(work.use_count(), 1);
}

TEST(PendingCollective, OfADestroyedGroupRaisesAtEachSettleAndNeverWaits) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  auto work = c10::make_intrusive<FakeWork>();
  const auto buffer = at::zeros({2, 3});
  StartedCollective start;
  start.op = "all_reduce";
  start.group = group;
  start.work = work;
  start.outputs = {buffer};
  auto collective = c10::make_intrusive<PendingCollective>(std::move(start));
  group.reset();
  for (int i = 0; i < 2; ++i) {
    const auto error = error_of(*collective);
    EXPECT_PRED_FORMAT2(IsSubstring, "process group '(unnamed)' was destroyed", error);
    EXPECT_PRED_FORMAT2(IsSubstring, "funcol::all_reduce", error);
    EXPECT_PRED_FORMAT2(IsSubstring, "[2, 3]", error);
  }
  EXPECT_EQ(work->num_waits, 0);
  EXPECT_EQ(buffer.use_count(), 3) << "the Work may still write into it, so its memory must not be replaced";
  work->completed = true;
  sweep_orphans();
  EXPECT_EQ(buffer.use_count(), 2);
  collective.reset();
  EXPECT_EQ(buffer.use_count(), 1);
}

TEST(PendingCollective, ThatWasSettledBeforeItsGroupWasDestroyedKeepsItsData) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  StartedCollective start;
  start.group = group;
  start.work = c10::make_intrusive<FakeWork>();
  auto collective = c10::make_intrusive<PendingCollective>(std::move(start));
  collective->settle();
  group.reset();
  EXPECT_NO_THROW(collective->settle());
}

TEST(PendingCollective, KeepsInputsAliveUntilTheWorkIsDoneAndNotLonger) {
  StartedCollective start;
  auto input = at::ones({4});
  start.work = c10::make_intrusive<FakeWork>();
  start.buffers = {input};
  start.outputs = {at::zeros({4})};
  auto collective = c10::make_intrusive<PendingCollective>(std::move(start));
  EXPECT_EQ(input.use_count(), 2);
  collective->settle();
  EXPECT_EQ(input.use_count(), 1);
}

TEST(PendingCollective, RaisesOnOneThreadThatItsGroupIsGoneWhileAnotherWaits) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, 2);
  std::atomic<bool> is_waited_for{false};
  std::atomic<bool> may_end{false};
  StartedCollective start;
  start.op = "all_reduce";
  start.group = group;
  start.work = c10::make_intrusive<FakeWork>([&] {
    is_waited_for = true;
    while (!may_end) {
      std::this_thread::yield();
    }
  });
  auto collective = c10::make_intrusive<PendingCollective>(std::move(start));
  std::thread waiter([&] { collective->settle(); });
  while (!is_waited_for) {
    std::this_thread::yield();
  }
  group.reset();
  EXPECT_PRED_FORMAT2(IsSubstring, "was destroyed", error_of(*collective));
  may_end = true;
  waiter.join();
}

TEST(PendingCollective, ThatAThreadWaitedForAtAForkIsAnErrorInTheChild) {
  std::atomic<bool> is_waited_for{false};
  std::atomic<bool> may_end{false};
  auto collective = pending(c10::make_intrusive<FakeWork>([&] {
    is_waited_for = true;
    while (!may_end) {
      std::this_thread::yield();
    }
  }));
  std::thread waiter([&] { collective->settle(); });
  while (!is_waited_for) {
    std::this_thread::yield();
  }
  EXPECT_TRUE(test::holds_in_child([&] {
    return error_of(*collective).find("had not finished when this process was forked") != std::string::npos;
  }));
  may_end = true;
  waiter.join();
}

}  // namespace
}  // namespace funcol::pending_collective_test
