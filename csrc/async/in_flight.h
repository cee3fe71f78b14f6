// The collectives of this process that are in flight: pending, dropped before they completed, or left to
// PyTorch's registry of Works.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "async/started_collective.h"
#include "comm/call_site.h"
#include "comm/forks.h"

namespace funcol {

// The place of a collective in the list of unwaited collectives: still pending, or dropped unused. Entering
// and leaving take a lock.
class UnwaitedEntry {
 public:
  UnwaitedEntry() = default;
  ~UnwaitedEntry() { leave(); }
  UnwaitedEntry(const UnwaitedEntry&) = delete;
  UnwaitedEntry& operator=(const UnwaitedEntry&) = delete;

  // Adds `collective`, which must live until leave(), and its Work and outputs until arrive() or leave().
  void enter(const StartedCollective& collective);

  // Notes that the Work has completed and may be destroyed, but was not waited for.
  void arrive();

  // Removes the collective, if it has entered. A collective that is dropped stays in the counts.
  void leave(bool is_dropped = false);

  // Returns the call site at which the collective entered.
  const CallSite& started() const { return started_; }

 private:
  friend class UnwaitedList;

  bool is_listed() const { return collective_ != nullptr && num_forks_ == num_forks(); }

  const StartedCollective* collective_ = nullptr;  // null unless it has entered
  bool has_arrived_ = false;
  CallSite started_;
  UnwaitedEntry* previous_ = nullptr;
  UnwaitedEntry* next_ = nullptr;
  uint64_t num_forks_ = 0;
};

// Returns the number of unwaited collectives, by op. A child process starts with none.
std::map<std::string, int64_t> unwaited_collectives();

// Waits until the Works of all unwaited collectives have completed, or none has for `patience`. Called at
// exit: a Work that completes later would meet a c10d that is being taken down.
void wait_for_unwaited(std::chrono::milliseconds patience);

enum class QueriedWorks : uint8_t {
  kAll,    // those on devices where queries are allowed; a Work that is written in Python needs the GIL
  kOnCpu,  // those that answer without a device or the GIL: for threads that must not wait
};

// Returns the collectives in flight, the oldest first. A collective is in flight until its Work reports
// completion or was waited for; a Work that is not queried counts as running. To be called without the GIL.
std::vector<InFlight> collectives_in_flight(QueriedWorks queried);

// Notes a collective that PyTorch's registry holds from now on; it is listed until its Work is destroyed.
void note_registered(std::string_view op, const GroupRef& group, const std::vector<at::Tensor>& outputs,
                     const c10::intrusive_ptr<c10d::Work>& work);

// Waits for the Works that PyTorch's registry has for `tensor`. The error names the collective if it was
// passed to note_registered().
void wait_on_registry(const at::Tensor& tensor);

// Returns "funcol::all_reduce failed on group 'dp'; result of shape [2, 3] has no data."
std::string failure_text(const InFlight& description);

// Calls `run`. Adds to its error the text that `describe` makes of the message, and rethrows it; with a text,
// errors other than c10's become DistBackendErrors. An empty text changes nothing.
template <typename Run, typename Describe>
void run_described(const Run& run, const Describe& describe) {
  try {
    run();
  } catch (c10::Error& error) {
    if (std::string text = describe(error.what_without_backtrace()); !text.empty()) {
      error.add_context(std::move(text));
    }
    throw;
  } catch (const std::exception& error) {
    if (const std::string text = describe(error.what()); !text.empty()) {
      C10_THROW_ERROR(DistBackendError, std::string(error.what()) + "\n" + text);
    }
    throw;
  }
}

// Returns "It was started 3.0 s ago (rank 1 of 2) at train.py:7, for parameters of layer 0."
std::string origin_text(const InFlight& description);

// Returns "\nAlso in flight in this process: ...", for the error of the collective of `own`, or an empty
// string.
std::string others_in_flight(const UnwaitedEntry& own);

// Returns a line with the number of the collectives, then a line for each.
std::string in_flight_text(const std::vector<InFlight>& collectives);

}  // namespace funcol
