#include <gtest/gtest.h>

#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "async/in_flight.h"
#include "async/pending_collective.h"
#include "comm/orphaned_works.h"
#include "support/child_process.h"
#include "support/fake_work.h"

namespace funcol::outstanding_test {
namespace {

using test::completed_work;
using test::FakeWork;
using test::holds_in_child;

c10::intrusive_ptr<PendingCollective> pending(const char* op, c10::intrusive_ptr<c10d::Work> work,
                                              bool is_counted = true) {
  StartedCollective start;
  start.op = op;
  start.work = std::move(work);
  start.is_counted = is_counted;
  return c10::make_intrusive<PendingCollective>(std::move(start));
}

int64_t count(const std::string& op) {
  const auto counts = unwaited_collectives();
  const auto found = counts.find(op);
  return found == counts.end() ? 0 : found->second;
}

TEST(Unwaited, CountsACollectiveUntilItIsWaitedFor) {
  auto collective = pending("settled", completed_work());
  EXPECT_EQ(count("settled"), 1);
  collective->settle();
  EXPECT_EQ(count("settled"), 0);
  collective.reset();
  EXPECT_EQ(count("settled"), 0);
}

TEST(Unwaited, KeepsCountingACollectiveThatWasDropped) {
  pending("dropped by its caller", completed_work()).reset();
  EXPECT_EQ(count("dropped by its caller"), 1);
}

TEST(Unwaited, DoesNotCountACollectiveWhoseErrorWasSeen) {
  const auto collective =
      pending("failed", c10::make_intrusive<FakeWork>([] { throw std::runtime_error("no"); }));
  EXPECT_ANY_THROW(collective->settle());
  EXPECT_EQ(count("failed"), 0);
}

TEST(Unwaited, DoesNotCountWhatHasNoWorkOrIsCountedElsewhere) {
  const auto workless = pending("workless", {});
  const auto elsewhere = pending("elsewhere", completed_work(), /*is_counted=*/false);
  EXPECT_EQ(count("workless") + count("elsewhere"), 0);
}

TEST(Unwaited, CountsRightlyWhateverThreadsDoAtOnce) {
  std::vector<std::thread> threads;
  threads.reserve(8);
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([] {
      for (int j = 0; j < 100; ++j) {
        auto dropped = pending("of threads", completed_work());
        pending("of threads", completed_work())->settle();
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(count("of threads"), 800);
}

TEST(Unwaited, IsLetFinishWhetherItIsHeldOrDropped) {
  auto first = c10::make_intrusive<FakeWork>();
  auto second = c10::make_intrusive<FakeWork>();
  const auto held = pending("held", first);
  pending("dropped at the end", second).reset();
  std::thread ends([&] {
    first->completed = true;
    second->completed = true;
  });
  wait_for_unwaited(std::chrono::seconds(1));
  const bool had_finished = first->completed && second->completed;
  ends.join();
  EXPECT_TRUE(had_finished);
  EXPECT_EQ(first->num_waits + second->num_waits, 0);
}

TEST(Unwaited, IsNotLetFinishForEver) {
  auto work = c10::make_intrusive<FakeWork>();
  const auto held = pending("held", work);
  wait_for_unwaited(std::chrono::milliseconds(1));
  EXPECT_FALSE(work->completed);
}

TEST(Unwaited, IsEmptyInAChildProcess) {
  const auto parents = pending("parent's", completed_work());
  auto orphan = c10::make_intrusive<FakeWork>();
  pending("parent's", orphan).reset();
  EXPECT_TRUE(holds_in_child([&] {
    const auto own = pending("child's", completed_work());
    parents->settle();
    return sweep_orphans() == 0 && unwaited_collectives() == std::map<std::string, int64_t>{{"child's", 1}};
  }));
  EXPECT_EQ(count("parent's"), 2);
  orphan->completed = true;
}

TEST(Unwaited, AChildProcessGetsWhatWasDoneBeforeTheForkAndAnErrorForTheRest) {
  const auto finished = pending("all_reduce", completed_work());
  const auto running = pending("all_reduce", c10::make_intrusive<FakeWork>());
  EXPECT_TRUE(holds_in_child([&] {
    finished->settle();
    try {
      running->settle();
    } catch (const c10::DistBackendError&) {
      return true;
    }
    return false;
  }));
  running->settle();
}

}  // namespace
}  // namespace funcol::outstanding_test
