#include "async/pending_collective.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <new>
#include <numeric>
#include <set>
#include <utility>

#include "async/wake_key.h"
#include "comm/capture_safe_query.h"
#include "comm/gil_release.h"
#include "comm/orphaned_works.h"

namespace funcol {
namespace {

std::atomic<int64_t> num_waits{0};
std::atomic<int64_t> num_views{0};

// Leaves the Work to run by itself; the tensors that it reads and writes are kept until it has completed.
void leave_running(StartedCollective& start, const CallSite& started) {
  InFlight what(start.op, start.group, start.outputs, started);
  auto buffers = std::move(start.buffers);
  buffers.insert(buffers.end(), start.outputs.begin(), start.outputs.end());
  const bool is_on_cpu =
      std::ranges::all_of(buffers, [](const auto& buffer) { return !buffer.defined() || buffer.is_cpu(); });
  const bool ends_by_waiting = is_on_cpu && ends_only_by_waiting(*start.work, start.group);
  adopt_orphan(std::move(start.work), std::move(buffers), ends_by_waiting, std::move(what));
}

// Returns true if a second wait() may repeat the work of the first one, as in Gloo's reduce_scatter and
// receives.
bool may_run_twice(const c10d::Work& work) {
  const auto type = work.retrieveOpType();
  return type == c10d::OpType::UNKNOWN || c10d::isP2POp(type, /*batchP2P=*/true);
}

// Returns the functions that find the cause, if `error` is a backend's time-out: a rank made another call, or
// none.
std::string timeout_advice(std::string_view error) {
  const bool is_timeout =
      error.find("imed out") != std::string_view::npos || error.find("imeout") != std::string_view::npos;
  return is_timeout ? "\nTo find the rank that called something else, or nothing: run the step in `with "
                      "funcol.check_agreement():`. funcol.collectives.record_callers() adds the line that "
                      "started each collective."
                    : "";
}

// Describes this rank, the age of the collective and what else is in flight: for time-outs, which have causes
// elsewhere.
std::string origin_and_others(const StartedCollective& start, const UnwaitedEntry& own) {
  const auto& started = own.started();
  if (started.at_ms == 0) {
    return {};
  }
  return "\n" + origin_text(InFlight(start.op, start.group, {}, started)) + others_in_flight(own);
}

void wait_on(const c10::Stream& stream, const UsedStreams::End& end) {
  if (end.event) {
    end.event->block(stream);
  } else {
    const c10::StreamGuard on_stream(stream);
    end.work->wait();
  }
}

c10::Stream stream_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

void UsedStreams::begin(End end, std::vector<c10::Stream> ordered) {
  const bool is_captured = !CaptureSafeQuery().is_allowed();
  const std::scoped_lock lock(mutex_);
  std::swap(end_, end);  // the old one is destroyed after the lock is released
  ordered_ = std::move(ordered);
  is_captured_ = is_captured;
  is_begun_.store(true, std::memory_order_release);
}

void UsedStreams::order(const c10::Stream& stream) {
  End end;
  bool is_captured = false;
  {
    const std::scoped_lock lock(mutex_);
    if (!is_begun() || std::ranges::find(ordered_, stream) != ordered_.end()) {
      return;
    }
    end = end_;
    is_captured = is_captured_;
  }
  if (is_captured == CaptureSafeQuery().is_allowed()) {
    return;  // the capture in which it was waited for has ended, or one began since
  }
  run_blocking([&] { wait_on(stream, end); });
  const std::scoped_lock lock(mutex_);
  ordered_.push_back(stream);
}

bool UsedStreams::release_if_completed() {
  End end;
  {
    const std::scoped_lock lock(mutex_);
    end = end_;
  }
  if (is_begun() && !(end.event ? end.event->query() : end.work->isCompleted())) {
    return false;
  }
  const std::scoped_lock lock(mutex_);
  is_begun_.store(false, std::memory_order_release);
  std::swap(end_, end);
  return true;
}

int64_t total_bytes(const std::vector<at::Tensor>& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t{0}, [](int64_t sum, const auto& tensor) {
    return sum + (tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0);
  });
}

AsyncCounters async_counters() {
  return {num_waits.load(std::memory_order_relaxed), num_views.load(std::memory_order_relaxed)};
}

void count_view() { num_views.fetch_add(1, std::memory_order_relaxed); }

PendingCollective::PendingCollective(StartedCollective&& start)
    : start_(std::move(start)), resize_guards_(start_.outputs, *this), num_forks_at_start_(num_forks()) {
  if (!start_.work) {
    return;
  }
  if (!start_.is_kept_by_registry) {
    unwaited_.enter(start_);
  }
  if (!start_.outputs.empty() && !start_.outputs[0].is_cpu()) {
    start_stream_ = stream_of(start_.outputs[0].device());
    note_cuda_is_used();
    is_captured_ = !CaptureSafeQuery().is_allowed();
  }
}

PendingCollective::~PendingCollective() {
  if (is_in_child()) {
    new (&changed_) std::condition_variable();  // destroying the old one waits for threads of the parent
  }
  unwaited_.leave(/*is_dropped=*/true);
  if (state_.load(std::memory_order_acquire) == State::kRunning && start_.work &&
      !start_.is_kept_by_registry && !is_in_child()) {
    resize_guards_.remove();
    leave_running(start_, unwaited_.started());
  }
}

std::mutex& PendingCollective::mutex() noexcept { return is_in_child() ? mutex_in_child_ : mutex_; }

void PendingCollective::settle() {
  if (state_.load(std::memory_order_acquire) != State::kSettled) {
    StartedCollective finished;  // destroyed with the GIL, which Python's tensors need for that
    if (!settle_if_completed(finished)) {
      // The GIL is released before the mutex is taken: a thread that waits for the mutex with the GIL would
      // keep the thread that has the mutex from ever getting the GIL back.
      run_blocking([&] {
        Lock lock(mutex());
        await(lock, /*checks_group=*/true);
        mark_settled(finished);
      });
    }
  }
  if (state_.load(std::memory_order_acquire) == State::kFailed) {
    std::rethrow_exception(error_);
  }
  if (used_streams_.is_begun()) {
    used_streams_.order(stream_of(start_stream_->device()));
  }
}

// Settles with the GIL if neither the Work nor the mutex has to be waited for: to release the GIL and get it
// back costs more than the rest. Returns false otherwise.
bool PendingCollective::settle_if_completed(StartedCollective& finished) {
  Lock lock(mutex(), std::try_to_lock);
  if (!lock.owns_lock() || is_awaited()) {
    return false;
  }
  if (is_running()) {
    if (!has_completed()) {
      return false;
    }
    await(lock, /*checks_group=*/true);
  }
  mark_settled(finished);
  return true;
}

// Returns false on a device, where a query of the Work costs as much as waiting, and if a long epilogue is
// still to run.
bool PendingCollective::has_completed() const {
  constexpr int64_t kFewBytes = 1 << 15;
  if (!start_.work || start_stream_.has_value() ||
      (start_.epilogue && total_bytes(start_.outputs) > kFewBytes)) {
    return false;
  }
  return is_completed(*start_.work);
}

// Waits until the collective no longer runs. One thread waits for the Work, without the mutex. Others wait
// for that thread, unless the group is destroyed meanwhile.
void PendingCollective::await(Lock& lock, bool checks_group) {
  constexpr auto kGroupCheckInterval = std::chrono::milliseconds(20);
  while (is_running() && is_awaited()) {
    if (const auto end = start_.group.end()) {
      raise_ended(*end);
    }
    changed_.wait_for(lock, kGroupCheckInterval);
  }
  if (!is_running()) {
    return;
  }
  is_awaited_ = true;
  num_forks_awaited_ = num_forks();
  lock.unlock();
  const auto outcome = finish(checks_group);
  lock.lock();
  is_awaited_ = false;
  if (outcome == State::kArrived) {
    resize_guards_.remove();
  }
  state_.store(outcome, std::memory_order_release);
  changed_.notify_all();
}

// Settles a collective whose data, or error, has arrived. Needs the mutex.
void PendingCollective::mark_settled(StartedCollective& finished) {
  unwaited_.leave();
  if (state_.load(std::memory_order_relaxed) == State::kArrived) {
    if (const auto end = is_released_ ? start_.group.end() : std::nullopt) {
      try {
        raise_ended(*end);
      } catch (const c10::Error&) {
        error_ = std::current_exception();
      }
      state_.store(State::kFailed, std::memory_order_release);
      return;
    }
    num_waits.fetch_add(1, std::memory_order_relaxed);
    state_.store(State::kSettled, std::memory_order_release);
  }
  move_out(finished);
}

// Moves out all that is no longer needed. After a failure the outputs are kept, so that replacing their
// memory raises like every use.
void PendingCollective::move_out(StartedCollective& gone) {
  gone.work = std::move(start_.work);
  gone.buffers = std::move(start_.buffers);
  gone.epilogue = std::move(start_.epilogue);
  if (state_.load(std::memory_order_relaxed) != State::kFailed) {
    gone.outputs = std::move(start_.outputs);
  }
}

bool PendingCollective::release_if_completed() {
  StartedCollective finished;
  Lock lock(mutex(), std::try_to_lock);
  if (!lock.owns_lock()) {
    return false;
  }
  if (used_streams_.is_begun()) {
    return used_streams_.release_if_completed();
  }
  if (!is_running() || !start_.work || is_in_child()) {
    return true;
  }
  if (is_awaited() || !is_completed(*start_.work)) {
    return false;
  }
  if (start_stream_.has_value()) {
    // The stream that has to wait for the epilogue is known only at the first use of the result.
    release_buffers(finished.buffers);
    return true;
  }
  await(lock, /*checks_group=*/false);
  release(finished);
  return true;
}

void PendingCollective::wait_and_release() {
  StartedCollective gone;
  Lock lock(mutex());
  if (!is_running() || !start_.work) {
    return;
  }
  try {
    if (start_stream_.has_value()) {
      start_.work->wait();
      order_streams();
      release_buffers(gone.buffers);
    } else {
      await(lock, /*checks_group=*/true);
      release(gone);
    }
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): settle() meets it, too
  }
}

bool PendingCollective::wait_on_other_thread(const c10::intrusive_ptr<PendingCollective>& collective) {
  {
    const Lock lock(collective->mutex());
    auto& start = collective->start_;
    if (!collective->is_running() || !start.work || collective->start_stream_.has_value() ||
        !ends_only_by_waiting(*start.work, start.group)) {
      return false;
    }
  }
  wait_in_background([collective] {
    StartedCollective finished;
    Lock lock(collective->mutex());
    if (collective->is_running() && !collective->is_awaited()) {
      collective->await(lock, /*checks_group=*/true);
      collective->release(finished);
    }
  });
  return true;
}

// Releases Work and buffers of a collective that no longer runs. Needs the mutex. The caller destroys `gone`.
void PendingCollective::release(StartedCollective& gone) {
  if (is_released_ || !start_.work) {
    return;
  }
  description_ = describe();
  is_released_ = true;
  unwaited_.arrive();
  move_out(gone);
}

void PendingCollective::release_buffers(std::vector<at::Tensor>& gone) {
  const size_t num_read_later = start_.epilogue ? 1 : 0;
  for (size_t i = 0; i + num_read_later < start_.buffers.size(); ++i) {
    gone.push_back(std::exchange(start_.buffers[i], at::Tensor()));
  }
}

void PendingCollective::raise_ended(GroupEnd end) const {
  constexpr std::array<const char*, 3> kBefore = {"destroy_process_group()", "the abort",
                                                  "the reconfiguration"};
  C10_THROW_ERROR(DistBackendError,
                  c10::str("process group '", start_.group.name(), "' ", to_string(end),
                           " before this result was waited for. Use results, or call funcol.wait_tensor on "
                           "them, before ",
                           kBefore.at(static_cast<size_t>(end)), ".\n",
                           description_.empty() ? describe() : description_));
}

void PendingCollective::wait_for_work(bool checks_group) {
  if (const auto end = checks_group ? start_.group.end() : std::nullopt) {
    unwaited_.arrive();
    leave_running(start_, unwaited_.started());
    raise_ended(*end);
  }
  if (is_in_child() && (is_in_epilogue_.load(std::memory_order_acquire) || !start_.work->isCompleted())) {
    C10_THROW_ERROR(
        DistBackendError,
        "the collective runs in the parent process, and had not finished when this process was forked. "
        "Wait for results before a fork.");
  }
  TORCH_CHECK(start_.work->wait(), "the collective was aborted");
  // Some backends return from wait() as if nothing had happened when another thread aborts them.
  if (const auto end = checks_group ? start_.group.end() : std::nullopt;
      end.has_value() && *end != GroupEnd::kDestroyed) {
    raise_ended(*end);
  }
}

void PendingCollective::run_epilogue() {
  if (start_.epilogue) {
    is_in_epilogue_.store(true, std::memory_order_release);
    start_.epilogue(start_);
    is_in_epilogue_.store(false, std::memory_order_release);
  }
}

// Returns true if finish_on_side_stream() applies: a result with an epilogue, or a Work that must be waited
// for only once, is used on a stream other than the start stream. Returns false while a graph is captured,
// which no other stream may join.
bool PendingCollective::finishes_on_side_stream() const {
  return start_stream_.has_value() && start_.work && (start_.epilogue || may_run_twice(*start_.work)) &&
         stream_of(start_stream_->device()) != *start_stream_ && CaptureSafeQuery().is_allowed();
}

// Waits, and runs the epilogue, on a stream of its own, so that current and start stream wait for the
// collective alone, and not for other work on each other. Memory that the epilogue allocates belongs to that
// stream and is freed as the epilogue ends.
void PendingCollective::finish_on_side_stream(bool checks_group) {
  const auto device = start_stream_->device();
  const auto side_stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  const auto finished = std::make_shared<c10::Event>(device.type());
  {
    const c10::StreamGuard on_side_stream(side_stream);
    wait_for_work(checks_group);
    run_epilogue();
    finished->record(side_stream);
  }
  used_streams_.begin({.work = {}, .event = finished}, {});
  used_streams_.order(stream_of(device));
  used_streams_.order(*start_stream_);
}

// Returns true if a CUDA graph is being captured that does not contain the collective.
bool PendingCollective::is_outside_capture() const {
  return start_stream_.has_value() && start_.work && !is_captured_ && !CaptureSafeQuery().is_allowed();
}

// Blocks the host instead of the captured stream, which cannot wait for anything outside of the graph: the
// graph is replayed later.
void PendingCollective::finish_on_host(bool checks_group) {
  const CaptureSafeQuery relaxed;
  const auto device = start_stream_->device();
  const c10::StreamGuard on_side_stream(
      c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  wait_for_work(checks_group);
  run_epilogue();
  on_side_stream.current_stream().synchronize();
}

// Makes the start stream wait for the collective alone, not for other work on the current stream, which waits
// already.
void PendingCollective::order_streams() {
  if (!start_stream_.has_value() || !start_.work) {
    return;
  }
  const auto current = stream_of(start_stream_->device());
  if (start_.epilogue || may_run_twice(*start_.work)) {
    const auto finished = std::make_shared<c10::Event>(current.device_type());
    finished->record(current);
    used_streams_.begin({.work = {}, .event = finished}, {current});
  } else {
    used_streams_.begin({.work = start_.work, .event = {}}, {current});
  }
  used_streams_.order(*start_stream_);
}

// Waits, then runs the epilogue. Called without the mutex, by the one thread that waits.
PendingCollective::State PendingCollective::finish(bool checks_group) {
  const auto run = [&] {
    const c10::impl::ExcludeDispatchKeyGuard plain_tensors(kWakeKey);
    // Autograd has recorded the results already. Gloo's reduce_scatter writes them as it is waited for.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (is_outside_capture()) {
      return finish_on_host(checks_group);
    }
    if (finishes_on_side_stream()) {
      return finish_on_side_stream(checks_group);
    }
    if (start_.work) {
      wait_for_work(checks_group);
    }
    run_epilogue();
    order_streams();
  };
  try {
    run_described(run, [&](std::string_view error) {
      return describe() + origin_and_others(start_, unwaited_) + timeout_advice(error);
    });
    return State::kArrived;
  } catch (const std::exception&) {
    error_ = std::current_exception();
    return State::kFailed;
  }
}

std::string_view interned(const std::string& op) {
  static std::mutex mutex;
  static auto* names =
      new std::set<std::string>();  // NOLINT(cppcoreguidelines-owning-memory): never destroyed
  const std::scoped_lock lock(mutex);
  return *names->insert(op).first;
}

std::string PendingCollective::describe() const {
  return failure_text(InFlight(start_.op, start_.group, start_.outputs, {})) +
         " Each use of it raises this error again.";
}

}  // namespace funcol
