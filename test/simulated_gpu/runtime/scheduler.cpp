#include "scheduler.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <thread>

#include "reports.h"
#include "stalls.h"
#include "trace.h"

namespace simulated_gpu {
namespace {

// The queues run when a thread waits, when nothing was issued for this long, or when this much is queued.
constexpr std::chrono::milliseconds kIdle{10};
constexpr size_t kDepth = 1024;

// Between two looks at an operation that waits for other ranks.
constexpr std::chrono::microseconds kPoll{50};

// The time in which nothing begins or finishes that counts as a stall.
constexpr std::chrono::milliseconds kStall{500};

thread_local bool t_is_scheduler = false;

bool can_run(const Stream* stream, SteadyClock::time_point now) {
  if (stream->queue.empty()) {
    return false;
  }
  const Operation& front = stream->queue.front();
  return now >= front.not_before &&
         std::ranges::all_of(front.after, [](const Mark& mark) { return mark.done(); });
}

// The streams whose next operation has to run before `mark` is done.
void add_needed(const Mark& mark, SteadyClock::time_point now, std::set<Stream*>& seen,
                std::vector<Stream*>& needed) {
  if (mark.done() || !seen.insert(mark.stream.get()).second) {
    return;
  }
  if (can_run(mark.stream.get(), now)) {
    needed.push_back(mark.stream.get());
  } else if (!mark.stream->queue.empty()) {
    for (const Mark& before : mark.stream->queue.front().after) {
      add_needed(before, now, seen, needed);
    }
  }
}

}  // namespace

bool Scheduler::is_this_thread() { return t_is_scheduler; }

void Scheduler::make_room(Lock& lock) {
  if (num_queued_ > kDepth) {
    work_.notify_one();
    done_.wait(lock, [this] { return num_queued_ <= kDepth; });
  }
}

Mark Scheduler::push(const StreamPointer& stream, Operation operation,
                     const std::vector<const void*>& chains) {
  operation.order = num_issued_++;
  for (const void* chain : chains) {
    Mark& last = chains_[chain];
    if (last.stream != stream && is_to_note(last)) {
      operation.after.push_back(last);
    }
    last = {stream, stream->num_issued + 1};
  }
  if (stream->queue.empty()) {
    const auto by_id = [](const Stream* a, const Stream* b) { return a->id < b->id; };
    active_.insert(std::ranges::upper_bound(active_, stream.get(), by_id), stream.get());
  }
  stream->queue.push_back(std::move(operation));
  ++stream->num_issued;
  trace_issue(*stream, stream->queue.back());
  ++num_queued_;
  last_issue_ = SteadyClock::now();
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  } else if (num_queued_ == 1 || options().order == Options::Order::kFirst) {
    work_.notify_one();
  }
  return {stream, stream->num_issued};
}

cudaError_t Scheduler::wait_for(Lock& lock, const std::vector<Mark>& marks) {
  trace_wait(marks);
  for (const Mark& mark : marks) {
    if (mark.done()) {
      continue;
    }
    if (t_is_scheduler) {
      return cudaErrorNotPermitted;
    }
    demands_.push_back(mark);
    work_.notify_one();
    done_.wait(lock, [&] { return mark.done(); });
    demands_.erase(std::ranges::find_if(demands_, [&](const Mark& demand) {
      return demand.stream == mark.stream && demand.count == mark.count;
    }));
  }
  return failure_;
}

std::vector<Stream*> Scheduler::demanded(SteadyClock::time_point now) const {
  std::set<Stream*> seen;
  std::vector<Stream*> streams;
  for (const Mark& mark : demands_) {
    add_needed(mark, now, seen, streams);
  }
  std::ranges::sort(streams, [](auto* a, auto* b) { return a->id < b->id; });
  return streams;
}

Stream* Scheduler::pick() {
  const auto now = SteadyClock::now();
  const Options::Order order = options().order;
  std::vector<Stream*> candidates;
  if (order == Options::Order::kLazy) {
    candidates = demanded(now);
  }
  if (candidates.empty()) {
    std::ranges::copy_if(active_, std::back_inserter(candidates),
                         [&](const Stream* stream) { return can_run(stream, now); });
  }
  if (candidates.empty()) {
    return nullptr;
  }
  const auto issued_before = [](const Stream* a, const Stream* b) {
    return a->queue.front().order < b->queue.front().order;
  };
  switch (order) {
    case Options::Order::kFirst:
      return *std::ranges::min_element(candidates, issued_before);
    case Options::Order::kLast:
      return *std::ranges::max_element(candidates, issued_before);
    case Options::Order::kLazy:
      return candidates[random() % candidates.size()];
    case Options::Order::kRandom:
      break;
  }
  return pick_urgent(candidates);
}

// Few changes of priority find more than a draw at each step (Burckhardt and others, "A Randomized Scheduler
// with Probabilistic Guarantees of Finding Bugs"). Collectives are held back.
Stream* Scheduler::pick_urgent(const std::vector<Stream*>& candidates) {
  constexpr uint64_t kOneChangeIn = 16;
  if (random() % kOneChangeIn == 0) {
    candidates[random() % candidates.size()]->urgency = random();
  }
  const auto urgency = [](const Stream* stream) {
    const bool held_back = stream->queue.front().work.kind == Kind::kCollective;
    return held_back ? stream->urgency / 8 : stream->urgency;
  };
  return *std::ranges::max_element(candidates,
                                   [&](const Stream* a, const Stream* b) { return urgency(a) < urgency(b); });
}

// False: nothing is to run now.
bool Scheduler::wait_for_work(Lock& lock) {
  if (num_queued_ == 0) {
    work_.wait(lock);
    next_look_ = SteadyClock::now() + kStall;
    return false;
  }
  const bool now = !demands_.empty() || num_queued_ > kDepth || options().order == Options::Order::kFirst;
  if (!now && SteadyClock::now() < last_issue_ + kIdle) {
    work_.wait_until(lock, last_issue_ + kIdle);
    return false;
  }
  return true;
}

void Scheduler::run() {
  t_is_scheduler = true;
  pthread_setname_np(pthread_self(), "simulated_gpu");
  Lock lock(mutex);
  for (;;) {
    if (wait_for_work(lock) && !run_one(lock)) {
      work_.wait_for(lock, kPoll);  // all that is left waits for other ranks
    }
    look_for_stall(lock);
  }
}

void Scheduler::look_for_stall(Lock& lock) {
  if (num_queued_ == 0 || SteadyClock::now() < next_look_) {
    return;
  }
  const auto stalls = find_stalls(active_);
  lock.unlock();
  is_stall_told_ = true;
  tell_of_stalls(&stalls);
  lock.lock();
  next_look_ = SteadyClock::now() + kStall;
}

// Called without the lock, before other ranks can see what begins.
void Scheduler::end_stall() {
  if (is_stall_told_) {
    is_stall_told_ = false;
    tell_of_stalls(nullptr);
  }
  next_look_ = SteadyClock::now() + kStall;
}

bool Scheduler::run_one(Lock& lock) {
  Stream* const stream = pick();
  if (stream == nullptr) {
    return false;
  }
  Operation& front = stream->queue.front();  // stays where it is while others are added behind it
  lock.unlock();
  bool finished = true;
  bool failed = false;
  try {
    if (front.step) {
      finished = front.step();
    } else {
      end_stall();
      if (options().trace) {
        fprintf(stderr, "simulated GPU [%d]: stream %lu: %s\n", getpid(), stream->id,
                front.work.name.c_str());
      }
      front.step = front.work.begin();
      finished = !front.step;
    }
  } catch (const std::exception& error) {
    report(front.work.name + " on stream " + std::to_string(stream->id) + " failed: " + error.what() +
           (front.place ? "\n" + front.place->text() : ""));
    failed = true;
  }
  lock.lock();
  if (failed) {
    failure_ = cudaErrorLaunchFailure;
  }
  if (finished) {
    finish_front(lock, stream);
  } else {
    front.not_before = SteadyClock::now() + kPoll;
  }
  return true;
}

void Scheduler::finish_front(Lock& lock, Stream* stream) {
  std::optional<Operation> over(std::move(stream->queue.front()));
  stream->queue.pop_front();
  ++stream->num_finished;
  --num_queued_;
  if (stream->queue.empty()) {
    active_.erase(std::ranges::find(active_, stream));
  }
  done_.notify_all();
  lock.unlock();  // what the operation holds may need the lock to go
  over.reset();
  end_stall();
  lock.lock();
}

}  // namespace simulated_gpu
