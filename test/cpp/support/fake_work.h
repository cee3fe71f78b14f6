// A Work whose end the test decides.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

namespace funcol::test {

class FakeWork final : public c10d::Work {
 public:
  // `on_wait` runs at each wait(): fills the data, or throws.
  explicit FakeWork(std::function<void()> on_wait = [] {}) : on_wait_(std::move(on_wait)) {}

  bool wait(std::chrono::milliseconds /*timeout*/) override {
    ++num_waits;
    on_wait_();
    return !aborted;
  }
  bool isCompleted() override {
    ++num_asked;
    return completed;
  }

  std::atomic<int> num_waits{0};
  std::atomic<int> num_asked{0};
  std::atomic<bool> completed{false};
  std::atomic<bool> aborted{false};

 private:
  std::function<void()> on_wait_;
};

inline c10::intrusive_ptr<FakeWork> completed_work(std::function<void()> on_wait = [] {}) {
  auto work = c10::make_intrusive<FakeWork>(std::move(on_wait));
  work->completed = true;
  return work;
}

}  // namespace funcol::test
