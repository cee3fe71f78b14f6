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

constexpr int64_t kMinTrackedBytes = 4096;               // a collective that holds more is tracked
constexpr int64_t kMaxGradientBytes = int64_t{4} << 20;  // held by collectives of backward passes
constexpr size_t kMaxQueries = 16;                       // collectives that a new one queries
constexpr auto kTick = std::chrono::milliseconds(10);
constexpr int kNoGraphTask = -1;
constexpr int kIdleTicks = 100;  // until the thread sleeps

struct TrackedCollective {
  c10::weak_intrusive_ptr<PendingCollective> collective;
  bool is_on_cpu;
  int64_t gradient_bytes;  // if a backward pass started it, else 0
  int num_queries = 0;
  bool is_waited_on_other_thread = false;
};

thread_local int num_gradient_nodes = 0;

class BufferReleaser final : public ForkSafe<BufferReleaser> {
 public:
  void add(const PendingPtr& collective, bool is_on_cpu, int64_t num_bytes) {
    const std::scoped_lock lock(mutex_);
    tracked_.push_back({c10::weak_intrusive_ptr<PendingCollective>(collective), is_on_cpu,
                        num_gradient_nodes > 0 ? num_bytes : 0});
    num_tracked_.store(tracked_.size(), std::memory_order_relaxed);
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
  void release_some() {
    if (num_tracked_.load(std::memory_order_relaxed) == 0) {
      return;
    }
    const CaptureSafeQuery query;
    for (size_t i = 0; i < kMaxQueries; ++i) {
      auto tracked = pop_first(query.is_allowed());
      if (!tracked.has_value()) {
        return;
      }
      if (!try_release(*tracked)) {
        return restore({&*tracked, 1});
      }
    }
  }

  // Waits until collectives of backward passes hold at most kMaxGradientBytes.
  void wait_for_gradients() {
    if (num_tracked_.load(std::memory_order_relaxed) == 0) {
      return;
    }
    while (const auto collective = pop_oldest_gradient()) {
      run_blocking([&] { collective->wait_and_release(); });
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
  friend class ForkSafe<BufferReleaser>;

  // Resets the child, which starts without tracked collectives and without a thread.
  void reset_in_child() {
    leak(tracked_);
    leak(thread_);
    new (&wakes_) std::condition_variable();  // the parent's thread waits at the old one
    num_tracked_.store(0, std::memory_order_relaxed);
    has_thread_ = false;
    is_asleep_ = false;
  }

  void run() {
    int num_idle = 0;
    std::unique_lock lock(mutex_);
    while (!is_stopped_) {
      const bool is_idle = std::ranges::none_of(tracked_, &TrackedCollective::is_on_cpu);
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
        release_completed_on_cpu();
        lock.lock();
      }
    }
  }

  void release_completed_on_cpu() {
    auto collectives = extract_on_cpu();
    std::erase_if(collectives, try_release);
    std::ranges::for_each(collectives, wait_on_other_thread);
    restore(collectives);
  }

  // Removes and returns the first collective. Returns nullopt if there is none, or if it is on a device that
  // must not be queried.
  std::optional<TrackedCollective> pop_first(bool may_query_devices) {
    const std::scoped_lock lock(mutex_);
    if (tracked_.empty() || !(may_query_devices || tracked_.front().is_on_cpu)) {
      return std::nullopt;
    }
    std::optional<TrackedCollective> first(std::move(tracked_.front()));
    tracked_.pop_front();
    num_tracked_.store(tracked_.size(), std::memory_order_relaxed);
    return first;
  }

  // Removes and returns the oldest collective of a backward pass; null while such collectives hold at most
  // kMaxGradientBytes together.
  PendingPtr pop_oldest_gradient() {
    const std::scoped_lock lock(mutex_);
    int64_t num_bytes = 0;
    for (const auto& tracked : tracked_) {
      num_bytes += tracked.collective.expired() ? 0 : tracked.gradient_bytes;
    }
    if (num_bytes <= kMaxGradientBytes) {
      return {};
    }
    const auto oldest = std::ranges::find_if(tracked_, [](const auto& tracked) {
      return tracked.gradient_bytes > 0 && !tracked.collective.expired();
    });
    if (oldest == tracked_.end()) {  // dropped by another thread meanwhile
      return {};
    }
    auto collective = oldest->collective.lock();
    tracked_.erase(oldest);
    num_tracked_.store(tracked_.size(), std::memory_order_relaxed);
    return collective;
  }

  std::vector<TrackedCollective> extract_on_cpu() {
    const std::scoped_lock lock(mutex_);
    auto taken = extract_if(tracked_, &TrackedCollective::is_on_cpu);
    num_tracked_.store(tracked_.size(), std::memory_order_relaxed);
    return taken;
  }

  // Inserts `collectives` at the front: they are the oldest.
  void restore(std::span<TrackedCollective> collectives) {
    const std::scoped_lock lock(mutex_);
    tracked_.insert(tracked_.begin(), std::make_move_iterator(collectives.begin()),
                    std::make_move_iterator(collectives.end()));
    num_tracked_.store(tracked_.size(), std::memory_order_relaxed);
  }

  static bool try_release(TrackedCollective& tracked) {
    const auto collective = tracked.collective.lock();
    ++tracked.num_queries;
    return !collective || collective->release_if_completed();
  }

  // Lets another thread wait if the Work completes only in wait(). Skips the first query: most results are
  // used soon. The collective is tracked until it has completed.
  static void wait_on_other_thread(TrackedCollective& tracked) {
    if (tracked.num_queries > 1 && !tracked.is_waited_on_other_thread) {
      const auto collective = tracked.collective.lock();
      tracked.is_waited_on_other_thread = collective && PendingCollective::wait_on_other_thread(collective);
    }
  }

  std::condition_variable wakes_;
  std::deque<TrackedCollective> tracked_;  // oldest first
  std::atomic<size_t> num_tracked_{0};
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
  const bool is_tracked = start.work && !start.is_kept_by_registry && num_bytes > kMinTrackedBytes;
  const bool is_on_cpu = !start.outputs.empty() && start.outputs[0].is_cpu();
  const bool has_epilogue = start.epilogue != nullptr;
  auto collective = c10::make_intrusive<PendingCollective>(std::move(start));
  BufferReleaser::instance().release_some();
  if (collective->is_captured()) {  // it does not run now
    wait_within_capture(collective, has_epilogue);
  } else if (is_tracked) {
    BufferReleaser::instance().add(collective, is_on_cpu, num_bytes);
  }
  return collective;
}

GradientCollectives::GradientCollectives() {
  BufferReleaser::instance().wait_for_gradients();
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

void stop_release_thread() { BufferReleaser::instance().stop(); }

}  // namespace funcol
