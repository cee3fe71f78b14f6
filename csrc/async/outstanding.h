// The collectives that nobody has waited for: still pending, or dropped unused.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/collective_info.h"

namespace funcol {

// A collective as its entry in the list refers to it. What is referred to must stay until arrive() or
// leave(), `op` for ever.
struct Unwaited {
  std::string_view op;
  const GroupRef* group = nullptr;
  const std::vector<at::Tensor>* outputs = nullptr;
  const c10::intrusive_ptr<c10d::Work>* work = nullptr;
  bool is_counted = true;  // in unwaited_collectives()
};

// A pending collective's place in the list. Entering and leaving take a lock.
class UnwaitedEntry {
 public:
  UnwaitedEntry() = default;
  ~UnwaitedEntry() { leave(); }
  UnwaitedEntry(const UnwaitedEntry&) = delete;
  UnwaitedEntry& operator=(const UnwaitedEntry&) = delete;

  void enter(const Unwaited& collective);

  // The Work is over and may go, but nobody waited for it.
  void arrive();

  // Does nothing if it has not entered. A collective that is dropped stays in the counts.
  void leave(bool is_dropped = false);

  // When the collective entered.
  const CallSite& started() const { return started_; }

 private:
  friend class UnwaitedList;

  Unwaited what_;  // without a Work once it is over
  CallSite started_;
  bool is_in_ = false;
  UnwaitedEntry* previous_ = nullptr;
  UnwaitedEntry* next_ = nullptr;
  uint64_t num_forks_ = 0;
};

// An entry of the list, and its Work.
struct UnwaitedWork {
  const UnwaitedEntry* entry;
  InFlight what;
  c10::intrusive_ptr<c10d::Work> work;
};

// Returns the unwaited collectives whose Work is not known to have completed, the oldest first.
std::vector<UnwaitedWork> unwaited_works();

// The number of unwaited collectives, by op. A child process starts with none.
std::map<std::string, int64_t> unwaited_collectives();

// Returns when all their Works are done, or when none has ended for `patience`. Called at exit: a Work that
// ends later would meet a c10d that is being taken down.
void let_unwaited_finish(std::chrono::milliseconds patience);

// True of a Work that failed, too: whoever waits for it gets the error.
bool is_completed(c10d::Work& work);

}  // namespace funcol
