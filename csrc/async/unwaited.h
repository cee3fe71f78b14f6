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

// A place in the list of those that are pending. Costs a lock on the way in and out.
class UnwaitedEntry {
 public:
  UnwaitedEntry() = default;
  ~UnwaitedEntry() { leave(); }
  UnwaitedEntry(const UnwaitedEntry&) = delete;
  UnwaitedEntry& operator=(const UnwaitedEntry&) = delete;

  // The Work must stay as it is until arrive() or leave(), `op` for ever.
  void enter(std::string_view op, const c10::intrusive_ptr<c10d::Work>& work);

  // The Work is over and may go, but nobody waited for it.
  void arrive();

  // Does nothing if it is not in. One that is dropped stays in the counts.
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

// How many there are, by op. A child process starts with none: they are its parent's.
std::map<std::string, int64_t> unwaited_collectives();

// Returns when the Works of all of them are done, or when none of them ends for as long as `patience`: at
// exit, where what ends later meets a c10d that is being taken down.
void let_unwaited_finish(std::chrono::milliseconds patience);

// How often this process and its parents forked: differs from its value before in a child alone.
uint64_t num_forks() noexcept;

}  // namespace funcol
