#include "async/pending_collective.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Event.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <numeric>
#include <set>
#include <sstream>
#include <utility>

#include "async/wake_key.h"
#include "comm/blocking.h"
#include "comm/orphaned_works.h"

namespace funcol {
namespace {

std::atomic<int64_t> num_waits{0};
std::atomic<int64_t> num_views{0};

// Gloo's reduce_scatter is an all_reduce, which keeps what it needs itself, and a copy that only wait()
// makes: it would never say that it is done.
bool is_done_only_by_waiting(const PendingCollective::Start& start) {
  if (!start.op.starts_with("reduce_scatter") || start.outputs.empty()) {
    return false;
  }
  const auto group = start.group.lock();
  return group && backend_name(*group, start.outputs[0].device().type()) == "gloo";
}

int64_t num_bytes(const std::vector<at::Tensor>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0}, [](int64_t sum, const auto& tensor) {
    return sum + static_cast<int64_t>(tensor.nbytes());
  });
}

// The Work goes on by itself, and what it reads and writes stays until it is done.
void leave_running(PendingCollective::Start& start) {
  if (is_done_only_by_waiting(start)) {
    return;
  }
  auto buffers = std::move(start.buffers);
  buffers.insert(buffers.end(), start.outputs.begin(), start.outputs.end());
  adopt_orphan(std::move(start.work), std::move(buffers));
}

}  // namespace

AsyncCounters async_counters() {
  return {num_waits.load(std::memory_order_relaxed), num_views.load(std::memory_order_relaxed)};
}

void count_view() { num_views.fetch_add(1, std::memory_order_relaxed); }

PendingCollective::PendingCollective(Start&& start)
    : start_(std::move(start)), resize_guards_(start_.outputs, *this), num_forks_at_start_(num_forks()) {
  if (!start_.work) {
    return;
  }
  if (start_.is_counted) {
    unwaited_.enter(start_.op, start_.work);
  }
  if (!start_.outputs.empty() && !start_.outputs[0].is_cpu()) {
    const auto device = start_.outputs[0].device();
    start_stream_ = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }
}

PendingCollective::~PendingCollective() {
  if (state_.load(std::memory_order_acquire) == State::kRunning && start_.work) {
    unwaited_.leave(/*is_dropped=*/true);
    resize_guards_.remove();
    if (num_forks_at_start_ == num_forks()) {
      leave_running(start_);
    }
  }
}

void PendingCollective::settle() {
  if (state_.load(std::memory_order_acquire) == State::kRunning) {
    Start finished;  // destroyed with the GIL, which Python's tensors need for that
    if (!finish_if_over(finished)) {
      // The GIL goes before the mutex is taken: a thread that waits for the mutex while it holds the GIL
      // would keep the one that has the mutex from ever getting the GIL back.
      run_blocking([&] {
        const std::scoped_lock lock(mutex_);
        finish_once(finished);
      });
    }
  }
  if (state_.load(std::memory_order_acquire) == State::kFailed) {
    std::rethrow_exception(error_);
  }
}

// Under the mutex.
void PendingCollective::finish_once(Start& finished) {
  if (state_.load(std::memory_order_relaxed) == State::kRunning) {
    const auto outcome = finish();
    if (outcome == State::kSettled) {
      resize_guards_.remove();
      finished = std::move(start_);
    } else {  // to replace the memory raises as all uses do
      auto outputs = start_.outputs;
      finished = std::move(start_);
      start_.outputs = std::move(outputs);
    }
    state_.store(outcome, std::memory_order_release);
  }
}

// Where there is nothing to wait for, neither the Work nor the mutex, the GIL may be kept: to let it go and
// get it back costs more than the rest.
bool PendingCollective::finish_if_over(Start& finished) {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !is_over()) {
    return false;
  }
  finish_once(finished);
  return true;
}

// Not asked on a device, which takes as long to answer, nor before an epilogue that has much to do.
bool PendingCollective::is_over() const {
  constexpr int64_t kFewBytes = 1 << 15;
  if (!start_.work || start_stream_.has_value() ||
      (start_.epilogue && num_bytes(start_.outputs) > kFewBytes)) {
    return false;
  }
  try {
    return start_.work->isCompleted();
  } catch (const std::exception&) {  // which finish() will find, too
    return false;
  }
}

void PendingCollective::wait_for_work() {
  if (start_.group.is_destroyed()) {
    leave_running(start_);
    C10_THROW_ERROR(DistBackendError,
                    c10::str("process group '", start_.group.name(),
                             "' was destroyed before this result was waited for. Use results, or "
                             "call funcol.wait_tensor on them, before destroy_process_group()."));
  }
  if (num_forks_at_start_ != num_forks() && !start_.work->isCompleted()) {
    C10_THROW_ERROR(
        DistBackendError,
        "the collective runs in the parent process, and had not finished when this process was forked. "
        "Wait for results before a fork.");
  }
  TORCH_CHECK(start_.work->wait(), "the collective was aborted");
}

void PendingCollective::order_start_stream() const {
  if (!start_stream_.has_value()) {
    return;
  }
  const auto device = start_stream_->device();
  const auto current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (current != *start_stream_) {
    c10::Event finished(device.type());
    finished.record(current);
    finished.block(*start_stream_);
  }
}

PendingCollective::State PendingCollective::finish() {
  unwaited_.leave();
  try {
    const c10::impl::ExcludeDispatchKeyGuard plain_tensors(kWakeKey);
    // What is written now is the result as autograd has it already: Gloo's reduce_scatter copies as it is
    // waited for.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (start_.work) {
      wait_for_work();
    }
    if (start_.epilogue) {
      start_.epilogue(start_);
    }
    order_start_stream();
    num_waits.fetch_add(1, std::memory_order_relaxed);
    return State::kSettled;
  } catch (c10::Error& error) {
    error.add_context(describe());
    error_ = std::current_exception();
  } catch (const std::exception& error) {
    error_ =
        std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                                      std::string(error.what()) + "\n" + describe()));
  }
  return State::kFailed;
}

std::string_view interned(const std::string& op) {
  static std::mutex mutex;
  static auto* names =
      new std::set<std::string>();  // NOLINT(cppcoreguidelines-owning-memory): never destroyed
  const std::scoped_lock lock(mutex);
  return *names->insert(op).first;
}

std::string PendingCollective::describe() const {
  std::ostringstream text;
  text << "funcol::" << start_.op << " failed on group '" << start_.group.name() << "'; result of shape ";
  for (size_t i = 0; i < start_.outputs.size(); ++i) {
    text << (i == 0 ? "" : ", ") << start_.outputs[i].sizes();
  }
  text << " has no data. Each use of it raises this error again.";
  return text.str();
}

}  // namespace funcol
