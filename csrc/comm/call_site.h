// The time, caller and purpose of a collective's start, for messages about collectives in flight.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/group_ref.h"

namespace funcol {

// Text with shared ownership; null means none.
using Text = std::shared_ptr<const std::string>;

struct CallSite {
  int64_t at_ms = 0;  // on a clock that never goes back
  Text caller;        // "train.py:41 in step"; null unless callers are recorded, and where no Python code is
  Text purpose;       // current_purpose(); null unless purposes are wanted

  // Returns the current time, caller and purpose. Takes some 10 ns while nothing is recorded.
  static CallSite now();
  // Returns the time since the start in seconds, to some milliseconds.
  double seconds() const;
};

// A description of a collective that has been started and may still be running.
struct InFlight {
  InFlight() = default;
  // Describes a collective with the results `outputs`.
  InFlight(std::string_view op, GroupRef group, at::TensorList outputs, CallSite started);

  // Returns the description. Waits neither for a lock of a device nor for the GIL.
  std::string text() const;

  std::string_view op;  // never destroyed
  GroupRef group;
  std::vector<std::vector<int64_t>> shapes;
  std::optional<at::ScalarType> dtype;  // of the first result
  bool is_on_cpu = true;
  CallSite started;
};

// Returns " (rank 1 of 2)"; an empty string for groups that no longer exist or are written in Python.
std::string own_rank_text(const GroupRef& group);

// Sets whether CallSite::now() records the line of Python that started the collective, and its purpose.
void record_callers(bool enabled);

// Finds the line of Python that the current thread is in. The Python bindings set one; the default finds
// none.
using FindCaller = Text (*)();
void set_find_caller(FindCaller find);

// A scope in which the collectives that this thread starts are for `text`, which must outlive the object.
// Nested labels form a purpose, the outermost first: "layers.0 / aten::mm / all_gather(dim 0, tp)".
class Label {
 public:
  explicit Label(std::string_view text) noexcept;
  ~Label();
  Label(const Label&) = delete;
  Label& operator=(const Label&) = delete;

 private:
  friend Text current_purpose();
  std::string_view text_;
  const Label* outer_;
};

// Returns the purpose that this thread's labels form, after the name of its module; null if there are none.
Text current_purpose();

// Returns the module whose forward or backward pass runs on this thread, such as "layers.0.attention"; null
// if there is none, or if modules are not named.
Text current_module();
// Sets the current module of this thread and returns the previous one.
Text set_current_module(Text module);

// A scope in which this thread runs the backward pass of `module`, which was current_module() in the forward
// pass.
class BackwardOf {
 public:
  explicit BackwardOf(const Text& module)
      : is_entered_(module != nullptr), before_(is_entered_ ? set_current_module(module) : nullptr) {}
  ~BackwardOf() {
    if (is_entered_) {
      set_current_module(std::move(before_));
    }
  }
  BackwardOf(const BackwardOf&) = delete;
  BackwardOf& operator=(const BackwardOf&) = delete;

 private:
  bool is_entered_;
  Text before_;
};

// Returns true if purposes are read: callers are recorded, or a profiler is active on this thread.
bool purposes_are_wanted() noexcept;

// A scope in which c10d gives the Works that this thread starts the current purpose as their name in
// profiles, if purposes are wanted and PyTorch supports such names. A name that the program has set comes
// first.
class NamedWorks {
 public:
  NamedWorks();
  ~NamedWorks();
  NamedWorks(const NamedWorks&) = delete;
  NamedWorks& operator=(const NamedWorks&) = delete;

 private:
  std::unique_ptr<std::string> before_;
};

}  // namespace funcol
