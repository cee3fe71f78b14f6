// The collectives that nobody has waited for: still pending, or dropped unused.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace funcol {

// A pending collective's place in the list. Entering and leaving take a lock.
class UnwaitedEntry {
 public:
  UnwaitedEntry() = default;
  ~UnwaitedEntry() { leave(); }
  UnwaitedEntry(const UnwaitedEntry&) = delete;
  UnwaitedEntry& operator=(const UnwaitedEntry&) = delete;

  // The Work must stay until arrive() or leave(), `op` for ever.
  void enter(std::string_view op, const c10::intrusive_ptr<c10d::Work>& work);

  // The Work is over and may go, but nobody waited for it.
  void arrive();

  // Does nothing if it has not entered. A collective that is dropped stays in the counts.
  void leave(bool is_dropped = false);

 private:
  friend class UnwaitedList;

  std::string_view op_;
  bool is_in_ = false;
  const c10::intrusive_ptr<c10d::Work>* work_ = nullptr;  // null once it is over
  UnwaitedEntry* previous_ = nullptr;
  UnwaitedEntry* next_ = nullptr;
  uint64_t num_forks_ = 0;
};

// The number of unwaited collectives, by op. A child process starts with none.
std::map<std::string, int64_t> unwaited_collectives();

// Returns when all their Works are done, or when none has ended for `patience`. Called at exit: a Work that
// ends later would meet a c10d that is being taken down.
void let_unwaited_finish(std::chrono::milliseconds patience);

// True of a Work that failed, too: whoever waits for it gets the error.
bool is_completed(c10d::Work& work);

// How often this process and its parents forked: a child's number differs from its parent's.
uint64_t num_forks() noexcept;

}  // namespace funcol
