#include "stalls.h"

#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace simulated_gpu {
namespace {

struct Hook {
  std::mutex mutex;
  OnStall on_stall;
};

// Never destroyed: the scheduler's thread runs until the process ends.
Hook& hook() {
  static auto* const hook = new Hook();
  return *hook;
}

// Collects the chains of running operations before which an operation cannot begin.
class Blockers {
 public:
  // Adds those of the operation at `index` of the queue.
  void add(const Stream* stream, size_t index) {
    add_first(stream, index);
    add_marks(stream->queue[index]);
  }

  std::vector<const void*> running;

 private:
  // Adds the first `count` operations of the queue.
  void add_first(const Stream* stream, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const Operation& operation = stream->queue[i];
      if (!seen_.insert({stream, i}).second) {
        continue;
      }
      if (!operation.step) {
        add_marks(operation);
      } else if (operation.work.chain != nullptr) {
        running.push_back(operation.work.chain);
      }
    }
  }

  void add_marks(const Operation& operation) {
    for (const Mark& mark : operation.after) {
      if (!mark.done()) {
        add_first(mark.stream.get(), mark.count - mark.stream->num_finished);
      }
    }
  }

  std::set<std::pair<const Stream*, size_t>> seen_;
};

}  // namespace

std::vector<Stalled> find_stalls(const std::vector<Stream*>& streams) {
  std::map<const void*, std::pair<const Stream*, size_t>> next;  // of each chain, by its stream and index
  for (const Stream* const stream : streams) {
    for (size_t i = 0; i < stream->queue.size(); ++i) {
      const Operation& operation = stream->queue[i];
      if (operation.work.chain == nullptr) {
        continue;
      }
      const auto [at, is_new] = next.try_emplace(operation.work.chain, stream, i);
      if (!is_new && operation.order < at->second.first->queue[at->second.second].order) {
        at->second = {stream, i};
      }
    }
  }
  std::vector<Stalled> stalls;
  for (const auto& [chain, where] : next) {
    const Operation& operation = where.first->queue[where.second];
    if (!operation.step) {
      Blockers blockers;
      blockers.add(where.first, where.second);
      stalls.push_back({chain, operation.work.name, operation.place, std::move(blockers.running)});
    }
  }
  return stalls;
}

void tell_of_stalls(const std::vector<Stalled>* stalls) {
  OnStall on_stall;
  {
    const std::scoped_lock lock(hook().mutex);
    on_stall = hook().on_stall;
  }
  if (on_stall) {
    on_stall(stalls);
  }
}

void set_on_stall(OnStall on_stall) {
  const std::scoped_lock lock(hook().mutex);
  hook().on_stall = std::move(on_stall);
}

}  // namespace simulated_gpu
