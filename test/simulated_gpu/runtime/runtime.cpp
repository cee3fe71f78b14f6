#include "runtime.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "memory.h"
#include "reports.h"
#include "trace.h"

namespace simulated_gpu {
namespace {

thread_local int t_device = 0;
thread_local cudaError_t t_error = cudaSuccess;

// Never destroyed: the scheduler's thread runs until the process ends.
Runtime& runtime() {
  static auto* const runtime = new Runtime();
  return *runtime;
}

struct Finder {
  std::mutex mutex;
  FindIssuePlace find;
};

Finder& finder() {
  static auto* const finder = new Finder();
  return *finder;
}

// Longer than a watchdog takes from one look to the next, so that what the program does not wait for is
// found.
constexpr std::chrono::seconds kWatchdogDelay{5};

thread_local bool t_issues = false;

// Returns true if the calling thread is known to Python.
bool is_known_to_python() {
  using ThisThreadState = void* (*)();
  static const auto this_thread_state =
      reinterpret_cast<ThisThreadState>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
  return this_thread_state != nullptr && this_thread_state() != nullptr;
}

// Returns false for a thread that only looks on, as the watchdog of a process group does.
bool is_of_program() { return t_issues || gettid() == getpid() || is_known_to_python(); }

}  // namespace

int current_device() { return t_device; }
void set_current_device(int device) { t_device = device; }

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) {
    t_error = error;
  }
  return error;
}

cudaError_t last_error(bool clear) {
  const cudaError_t error = t_error;
  t_error = clear ? cudaSuccess : error;
  return error;
}

cudaError_t not_simulated(const char* function) {
  fprintf(stderr, "simulated GPU: %s is not simulated\n", function);
  return remember(cudaErrorNotSupported);
}

IssuedPointer issue_place(const Work& work) {
  if (!options().races || (work.reads.empty() && work.writes.empty())) {
    return nullptr;
  }
  FindIssuePlace find;
  {
    const std::scoped_lock lock(finder().mutex);
    find = finder().find;
  }
  auto issued = std::make_shared<Issued>();
  issued->name = work.name;
  issued->kind = work.kind;
  issued->place = find ? find() : nullptr;
  return issued;
}

Locked::Locked() : runtime_(runtime()), lock_(runtime_.scheduler.mutex) {}

Locked::~Locked() {
  const auto conflicts = std::move(runtime_.conflicts);
  runtime_.conflicts.clear();
  lock_.unlock();
  for (const Conflict& conflict : conflicts) {
    report(conflict.text());
  }
}

StreamPointer Locked::find(cudaStream_t handle) { return runtime_.streams.find(handle, t_device); }

cudaError_t Locked::issue(const StreamPointer& stream, Work work, std::vector<const void*> chains,
                          const IssuedPointer& issued, const Mark& after, const Clock* after_clock) {
  if (Scheduler::is_this_thread()) {
    return cudaErrorNotPermitted;  // a host function calls CUDA
  }
  t_issues = t_issues || work.kind != Kind::kOrder;  // a watchdog that frees memory records events
  if (runtime_.streams.is_default(stream)) {
    if (const auto error = runtime_.captures.check_default_stream(stream->device)) {
      return error;
    }
  }
  if (work.chain != nullptr) {
    chains.push_back(work.chain);
  }
  if (stream->capture) {
    if (work.kind == Kind::kPoison) {
      return cudaSuccess;
    }
    auto node = issued ? std::make_shared<Issued>(*issued) : nullptr;
    if (node) {
      node->line = stream->capture->graph->nodes.size();
    }
    return Captures::record(stream, std::move(work), std::move(chains), std::move(node));
  }
  runtime_.scheduler.make_room(lock_);
  Operation operation;
  order_behind_default_stream(stream, operation);
  stream->clock.merge(runtime_.seen_by_host);
  if (after_clock != nullptr) {
    stream->clock.merge(*after_clock);
  }
  if (is_to_note(after)) {
    operation.after.push_back(after);
  }
  if (issued) {
    note_accesses(stream, work, issued);
  }
  const auto written = work.writes;
  operation.work = std::move(work);
  operation.place = issued ? issued->place : nullptr;
  const Mark mark = runtime_.scheduler.push(stream, std::move(operation), chains);
  note_host_writes(written, mark);
  stream->clock.set(stream->id, mark.count);
  return cudaSuccess;
}

// The default stream waits for all blocking streams, and they for it.
void Locked::order_behind_default_stream(const StreamPointer& stream, Operation& operation) {
  const auto put_behind = [&](const StreamPointer& other) {
    stream->clock.merge(other->clock);
    if (const Mark mark{other, other->num_issued}; is_to_note(mark)) {
      operation.after.push_back(mark);
    }
  };
  if (!stream->blocking) {
    return;
  }
  if (!runtime_.streams.is_default(stream)) {
    put_behind(runtime_.streams.default_of(stream->device));
    return;
  }
  for (const StreamPointer& other : runtime_.streams.every()) {
    if (other != stream && other->blocking && other->device == stream->device) {
      put_behind(other);
    }
  }
}

void Locked::note_host_writes(const std::vector<Range>& ranges, const Mark& mark) {
  for (const Range& range : ranges) {
    if (range.size != 0 && !memory().is_device_address(range.begin)) {
      std::erase_if(runtime_.host_writes, [](const auto& one) { return one.second.done(); });
      runtime_.host_writes.emplace_back(range, mark);
    }
  }
}

bool Locked::will_be_written(const std::vector<Range>& ranges) {
  const auto end_of = [](const Range& range) { return static_cast<const char*>(range.begin) + range.size; };
  const auto overlaps = [&](const Range& range, const auto& write) {
    return !write.second.done() && range.begin < end_of(write.first) && write.first.begin < end_of(range);
  };
  return std::ranges::any_of(ranges, [&](const Range& range) {
    return std::ranges::any_of(runtime_.host_writes,
                               [&](const auto& write) { return overlaps(range, write); });
  });
}

void Locked::note_accesses(const StreamPointer& stream, const Work& work, const IssuedPointer& issued) {
  auto numbered = std::make_shared<Issued>(*issued);
  numbered->line = stream->id;
  numbered->number = stream->num_issued + 1;
  const auto is_ordered = [&](const Issued& earlier) {
    return earlier.line == stream->id || stream->clock.covers(earlier.line, earlier.number);
  };
  std::optional<Conflict> found;  // the first: others of the operation have the same cause
  const auto add = [&](const std::vector<Range>& ranges, bool writes) {
    for (const Range& range : ranges) {
      if (!memory().is_device_address(range.begin)) {
        continue;
      }
      auto conflict = runtime_.history.add(range, writes, numbered, is_ordered);
      if (conflict && !found) {
        found = std::move(conflict);
      }
    }
  };
  add(work.reads, false);
  add(work.writes, true);
  if (found) {
    runtime_.conflicts.push_back(std::move(*found));
  }
}

cudaError_t Locked::wait_for(const Mark& mark, const Clock& clock) {
  // The stream goes on meanwhile.
  const Clock covered = clock;  // NOLINT(performance-unnecessary-copy-initialization)
  const cudaError_t error = runtime_.scheduler.wait_for(lock_, {mark});
  note_finished(covered);
  return error;
}

cudaError_t Locked::wait_for(const StreamPointer& stream) {
  return wait_for({stream, stream->num_issued}, stream->clock);
}

cudaError_t Locked::wait_for_device(int device) {
  std::vector<Mark> marks;
  Clock covered;
  for (const StreamPointer& stream : runtime_.streams.every()) {
    if (stream->device == device) {
      marks.push_back({stream, stream->num_issued});
      covered.merge(stream->clock);
    }
  }
  const cudaError_t error = runtime_.scheduler.wait_for(lock_, marks);
  note_finished(covered);
  runtime_.streams.drop_destroyed(device);
  return error;
}

void Locked::note_finished(const Clock& clock) { runtime_.seen_by_host.merge(clock); }

bool Locked::shows_finished(const Clock& clock, SteadyClock::time_point time) {
  if (!is_of_program() && !runtime_.seen_by_host.covers(clock) &&
      SteadyClock::now() < time + kWatchdogDelay) {
    return false;
  }
  note_finished(clock);
  return true;
}

void set_find_issue_place(FindIssuePlace find) {
  const std::scoped_lock lock(finder().mutex);
  finder().find = std::move(find);
}

uint64_t random() { return runtime().scheduler.random(); }

}  // namespace simulated_gpu
