#include "comm/orphaned_works.h"

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <vector>

#include "comm/capture_safe_query.h"
#include "support/fake_work.h"

namespace funcol::orphaned_works_test {
namespace {

using test::FakeWork;
using FakeWorkPtr = c10::intrusive_ptr<FakeWork>;

class OrphanedWorks : public testing::Test {
 protected:
  void TearDown() override {
    for (const auto& work : works_) {
      work->completed = true;
    }
    EXPECT_EQ(sweep_orphans(), 0);
  }

  FakeWorkPtr adopt(const at::Tensor& buffer = {}) {
    works_.push_back(c10::make_intrusive<FakeWork>());
    adopt_orphan(works_.back(), {buffer});
    return works_.back();
  }

  std::vector<FakeWorkPtr> works_;
};

TEST_F(OrphanedWorks, KeepTheirBuffersUntilTheyAreDone) {
  const auto buffer = at::zeros({3});
  const auto work = adopt(buffer);
  EXPECT_EQ(sweep_orphans(), 1);
  EXPECT_EQ(buffer.use_count(), 2);
  work->completed = true;
  EXPECT_EQ(sweep_orphans(), 0);
  EXPECT_EQ(buffer.use_count(), 1);
}

TEST_F(OrphanedWorks, OfWhichOneFinishedAreFoundByAnyNumberOfPartialSweeps) {
  constexpr int kCount = 1000;
  for (int i = 0; i < kCount; ++i) {
    adopt();
  }
  works_[kCount / 2]->completed = true;
  for (int i = 0; i < kCount; ++i) {
    sweep_some_orphans();
  }
  EXPECT_EQ(works_[kCount / 2].use_count(), 1);
  EXPECT_EQ(sweep_orphans(), kCount - 1);
}

TEST_F(OrphanedWorks, ThatAreAllDoneGoInOnePartialSweep) {
  for (int i = 0; i < 1000; ++i) {
    adopt()->completed = true;
  }
  sweep_some_orphans();
  EXPECT_EQ(works_.front().use_count(), 1);
  EXPECT_EQ(works_.back().use_count(), 1);
}

// Of no memory: made without a GPU.
at::Tensor on_cuda() {
  return at::detail::make_tensor<c10::TensorImpl>(c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                  caffe2::TypeMeta::Make<float>(), at::Device(at::kCUDA, 0));
}

TEST_F(OrphanedWorks, AreNotAskedWhileAGraphIsCaptured) {
  static bool is_capturing;
  is_capturing = true;
  set_is_capturing([] { return is_capturing; });
  const auto work = adopt(on_cuda());
  work->completed = true;
  EXPECT_EQ(sweep_orphans(), 1);
  sweep_some_orphans();
  EXPECT_EQ(work->num_asked, 0);
  is_capturing = false;
  EXPECT_EQ(sweep_orphans(), 0);
  EXPECT_EQ(work->num_asked, 1);
}

// A Work that completes through its future only: isCompleted() stays false, as for a Work written in Python.
class FutureOnlyWork final : public c10d::Work {
 public:
  explicit FutureOnlyWork(c10d::OpType op_type = c10d::OpType::UNKNOWN) : Work(-1, op_type) {}
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  const c10::intrusive_ptr<c10::ivalue::Future> future =
      c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
};

TEST_F(OrphanedWorks, WithoutAnAnswerOfTheirOwnAreDoneWithTheirFuture) {
  const auto work = c10::make_intrusive<FutureOnlyWork>();
  adopt_orphan(work, {});
  EXPECT_EQ(sweep_orphans(), 1);
  work->future->markCompleted(c10::IValue());
  EXPECT_EQ(sweep_orphans(), 0);
}

TEST_F(OrphanedWorks, ThatEndOnlyByWaitingAreWaitedForAsideAndThenGo) {
  const auto buffer = at::zeros({3});
  std::atomic<bool> may_end{false};
  adopt_orphan(c10::make_intrusive<FakeWork>([&] {
                 while (!may_end) {
                   std::this_thread::yield();
                 }
               }),
               {buffer}, /*ends_only_by_waiting=*/true);
  EXPECT_EQ(sweep_orphans(), 1);
  EXPECT_EQ(buffer.use_count(), 2);
  may_end = true;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (sweep_orphans() > 0 && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(buffer.use_count(), 1);
}

}  // namespace
}  // namespace funcol::orphaned_works_test
