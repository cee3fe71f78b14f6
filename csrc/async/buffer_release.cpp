#include "async/buffer_release.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "async/async_tensor.h"
#include "async/dispatch_modes.h"
#include "async/pending_collective.h"
#include "comm/capture_safe_query.h"
#include "comm/extract_if.h"
#include "comm/forks.h"
#include "comm/gil_release.h"

namespace funcol {
namespace {

using PendingPtr = c10::intrusive_ptr<PendingCollective>;

constexpr int64_t kNotedBytes = 4096;                    // a collective that holds more is noted
constexpr int64_t kMaxGradientBytes = int64_t{4} << 20;  // held by collectives of backward passes
constexpr size_t kNumAsked = 16;                         // collectives that a new one queries
constexpr auto kTick = std::chrono::milliseconds(10);
constexpr int kNoGraphTask = -1;
constexpr int kIdleTicks = 100;  // until the thread sleeps

struct Holder {
  c10::weak_intrusive_ptr<PendingCollective> collective;
  bool is_on_cpu;
  int64_t gradient_bytes;  // if a backward pass started it, else 0
  int num_asked = 0;
  bool is_waited_aside = false;
};

thread_local int num_gradient_nodes = 0;

class HeldMemory final : public ForkSafe<HeldMemory> {
 public:
  void add(const PendingPtr& collective, bool is_on_cpu, int64_t num_bytes) {
    const std::scoped_lock lock(mutex_);
    holders_.push_back({c10::weak_intrusive_ptr<PendingCollective>(collective), is_on_cpu,
                        num_gradient_nodes > 0 ? num_bytes : 0});
    num_holders_.store(holders_.size(), std::memory_order_relaxed);
    if (!is_on_cpu || is_stopped_) {
      return;
    }
    if (!has_thread_) {
      has_thread_ = true;
      thread_ = std::thread([this] { run(); });
    } else if (is_asleep_) {
      wakes_.notify_one();
    }
  }

  // Releases the memory of a few completed collectives, from the oldest up to the first that still runs.
  void let_go_of_few() {
    if (num_holders_.load(std::memory_order_relaxed) == 0) {
      return;
    }
    const AskingDevices asking;
    for (size_t i = 0; i < kNumAsked; ++i) {
      auto holder = take_first(asking.is_allowed());
      if (!holder.has_value()) {
        return;
      }
      if (!is_done(*holder)) {
        return put_back({&*holder, 1});
      }
    }
  }

  // Waits until collectives of backward passes hold at most kMaxGradientBytes.
  void wait_for_gradients() {
    if (num_holders_.load(std::memory_order_relaxed) == 0) {
      return;
    }
    while (const auto collective = take_oldest_gradient()) {
      run_blocking([&] { collective->wait_and_let_go(); });
    }
  }

  void stop() {
    std::unique_lock lock(mutex_);
    is_stopped_ = true;
    wakes_.notify_one();
    if (has_thread_) {
      has_thread_ = false;
      auto thread = std::move(thread_);
      lock.unlock();
      thread.join();
    }
  }

 private:
  friend class ForkSafe<HeldMemory>;

  // Resets the child, which starts without holders and without a thread.
  void begin_anew() {
    leak(holders_);
    leak(thread_);
    new (&wakes_) std::condition_variable();  // the parent's thread waits at the old one
    num_holders_.store(0, std::memory_order_relaxed);
    has_thread_ = false;
    is_asleep_ = false;
  }

  void run() {
    int num_idle = 0;
    std::unique_lock lock(mutex_);
    while (!is_stopped_) {
      const bool is_idle = std::ranges::none_of(holders_, &Holder::is_on_cpu);
      num_idle = is_idle ? num_idle + 1 : 0;
      if (num_idle > kIdleTicks) {
        is_asleep_ = true;
        wakes_.wait(lock);
        is_asleep_ = false;
        num_idle = 0;
        continue;
      }
      wakes_.wait_for(lock, kTick);
      if (!is_idle) {
        lock.unlock();
        look_at_all();
        lock.lock();
      }
    }
  }

  void look_at_all() {
    auto holders = take_those_on_cpu();
    std::erase_if(holders, is_done);
    std::ranges::for_each(holders, wait_aside);
    put_back(holders);
  }

  // Removes and returns the first holder. Returns nullopt if there is none, or if it is on a device that must
  // not be queried.
  std::optional<Holder> take_first(bool may_ask_devices) {
    const std::scoped_lock lock(mutex_);
    if (holders_.empty() || !(may_ask_devices || holders_.front().is_on_cpu)) {
      return std::nullopt;
    }
    std::optional<Holder> first(std::move(holders_.front()));
    holders_.pop_front();
    num_holders_.store(holders_.size(), std::memory_order_relaxed);
    return first;
  }

  // Removes and returns the oldest collective of a backward pass; null while such collectives hold at most
  // kMaxGradientBytes together.
  PendingPtr take_oldest_gradient() {
    const std::scoped_lock lock(mutex_);
    int64_t num_bytes = 0;
    for (const auto& holder : holders_) {
      num_bytes += holder.collective.expired() ? 0 : holder.gradient_bytes;
    }
    if (num_bytes <= kMaxGradientBytes) {
      return {};
    }
    const auto oldest = std::ranges::find_if(holders_, [](const auto& holder) {
      return holder.gradient_bytes > 0 && !holder.collective.expired();
    });
    if (oldest == holders_.end()) {  // dropped by another thread meanwhile
      return {};
    }
    auto collective = oldest->collective.lock();
    holders_.erase(oldest);
    num_holders_.store(holders_.size(), std::memory_order_relaxed);
    return collective;
  }

  std::vector<Holder> take_those_on_cpu() {
    const std::scoped_lock lock(mutex_);
    auto taken = extract_if(holders_, &Holder::is_on_cpu);
    num_holders_.store(holders_.size(), std::memory_order_relaxed);
    return taken;
  }

  // Inserts `holders` at the front: they are the oldest.
  void put_back(std::span<Holder> holders) {
    const std::scoped_lock lock(mutex_);
    holders_.insert(holders_.begin(), std::make_move_iterator(holders.begin()),
                    std::make_move_iterator(holders.end()));
    num_holders_.store(holders_.size(), std::memory_order_relaxed);
  }

  static bool is_done(Holder& holder) {
    const auto collective = holder.collective.lock();
    ++holder.num_asked;
    return !collective || collective->let_go_if_over();
  }

  // Lets another thread wait if the Work completes only in wait(). Skips the first query: most results are
  // used soon. The collective stays a holder until it has completed.
  static void wait_aside(Holder& holder) {
    if (holder.num_asked > 1 && !holder.is_waited_aside) {
      const auto collective = holder.collective.lock();
      holder.is_waited_aside = collective && PendingCollective::wait_aside(collective);
    }
  }

  std::condition_variable wakes_;
  std::deque<Holder> holders_;  // oldest first
  std::atomic<size_t> num_holders_{0};
  std::thread thread_;
  bool has_thread_ = false;
  bool is_asleep_ = false;
  bool is_stopped_ = false;
};

// Returns the bytes that could be released.
int64_t held_bytes(const StartedCollective& start) {
  // A caller may drop some outputs before the others.
  return total_bytes(start.buffers) + (start.outputs.size() > 1 ? total_bytes(start.outputs) : 0);
}

// Makes the captured stream wait for the collective within the capture: at once for a gather that is merged,
// and for a gradient as the backward pass ends, on the stream of the pass's caller. PyTorch waits for both
// before it goes on.
void wait_within_capture(const PendingPtr& collective, bool has_epilogue) {
  if (has_epilogue) {
    collective->settle();
  } else if (torch::autograd::get_current_graph_task_id() != kNoGraphTask) {
    torch::autograd::Engine::get_default_engine().queue_callback([collective] { collective->settle(); });
  }
}

}  // namespace

PendingPtr make_pending_collective(StartedCollective&& start) {
  const auto num_bytes = held_bytes(start);
  const bool is_noted = start.work && !start.is_kept_elsewhere && num_bytes > kNotedBytes;
  const bool is_on_cpu = !start.outputs.empty() && start.outputs[0].is_cpu();
  const bool has_epilogue = start.epilogue != nullptr;
  auto collective = c10::make_intrusive<PendingCollective>(std::move(start));
  HeldMemory::instance().let_go_of_few();
  if (collective->is_captured()) {  // it does not run now
    wait_within_capture(collective, has_epilogue);
  } else if (is_noted) {
    HeldMemory::instance().add(collective, is_on_cpu, num_bytes);
  }
  return collective;
}

GradientCollectives::GradientCollectives() {
  HeldMemory::instance().wait_for_gradients();
  ++num_gradient_nodes;
}

GradientCollectives::~GradientCollectives() { --num_gradient_nodes; }

at::Tensor GradientCollectives::unshared(const at::Tensor& gradient) {
  if (!gradient.defined() || has_watching_layers() || belongs_to_layer(gradient) ||
      gradient.layout() != at::kStrided || !(gradient.is_cpu() || gradient.is_cuda())) {
    return gradient;
  }
  settle(gradient);
  const auto& storage = gradient.unsafeGetTensorImpl()->unsafe_storage();
  const bool is_ours_alone = gradient.use_count() == 1 && storage.use_count() == 1;
  // Sending copies a gradient with any other layout.
  const bool is_copied_anyway = !gradient.is_contiguous() || gradient.is_conj() || gradient.is_neg();
  return is_ours_alone || is_copied_anyway ? gradient : gradient.clone(at::MemoryFormat::Contiguous);
}

std::vector<at::Tensor> GradientCollectives::unshared(at::TensorList gradients) {
  std::vector<at::Tensor> own;
  own.reserve(gradients.size());
  for (const auto& gradient : gradients) {
    own.push_back(unshared(gradient));
  }
  return own;
}

void stop_letting_go() { HeldMemory::instance().stop(); }

}  // namespace funcol
