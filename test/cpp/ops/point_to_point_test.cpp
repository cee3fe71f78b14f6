#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "comm/orphaned_works.h"
#include "ops/collectives.h"
#include "support/fake_work.h"

namespace funcol::point_to_point_test {
namespace {

// Rank 0 of 2 on a backend that coalesces, and takes sends alone.
class CoalescingGroup final : public c10d::ProcessGroup {
 public:
  CoalescingGroup() : ProcessGroup(0, 2) {}
  const std::string getBackendName() const override { return "nccl"; }  // NOLINT: as PyTorch has it

  void startCoalescing(c10::DeviceType /*device*/) override { is_coalescing = true; }
  c10::intrusive_ptr<c10d::Work> endCoalescing(c10::DeviceType /*device*/) override {
    is_coalescing = false;
    return whole;
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& /*tensors*/, int /*rank*/,
                                      int /*tag*/) override {
    EXPECT_TRUE(is_coalescing);
    return c10::make_intrusive<test::FakeWork>();
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& /*tensors*/, int /*rank*/,
                                      int /*tag*/) override {
    throw std::runtime_error("no receives");
  }

  bool is_coalescing = false;
  const c10::intrusive_ptr<test::FakeWork> whole = c10::make_intrusive<test::FakeWork>();
};

TEST(BatchP2P, ThatFailsHalfWayEndsWhatItBeganAndKeepsItUntilItIsOver) {
  const auto group = c10::make_intrusive<CoalescingGroup>();
  const auto sent = at::ones({3});
  const auto num_orphans = sweep_orphans();
  EXPECT_THROW(start_batch_p2p({"isend", "irecv"}, {1, 1}, {0, 0}, {sent, at::zeros({3})}, group),
               std::runtime_error);
  EXPECT_FALSE(group->is_coalescing);
  EXPECT_EQ(sweep_orphans(), num_orphans + 1);
  group->whole->completed = true;
  EXPECT_EQ(sweep_orphans(), num_orphans);
}

}  // namespace
}  // namespace funcol::point_to_point_test
