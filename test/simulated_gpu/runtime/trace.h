// The trace file (--trace-file): what the host issues and when, for models of time.
//
// A line of JSON for each call of the program that issued something or waited, and for each mark of the
// program:
//
//   {"thread": 7, "issued": [<operation>...], "waits": [[<stream>, <number>]...], "own": 20, "begin": 100,
//   "end": 160}
//   {"mark": "step", "begin": 170}
//
// An operation is {"device", "stream", "number", "name", "kind", "after": [[<stream>, <number>]...], "read",
// "written", "host", "flops", "type", "ranks"}. Operations of a stream are numbered from 1. [2, 5] stands for
// the first 5 of stream 2: `after` has to be finished before the operation begins, and the host returned when
// all of `waits` were. Times are in nanoseconds; `own` is the thread's processor time since its last line, or
// mark. Calls within calls are a part of the outermost one.
#pragma once

#include <vector>

#include "stream.h"

namespace simulated_gpu {

inline bool is_traced() { return !options().trace_file.empty(); }

// Returns true if an operation has to note that it comes after `mark`. A trace holds the order even if the
// simulated stream has been fast.
inline bool is_to_note(const Mark& mark) { return mark.count > 0 && (is_traced() || !mark.done()); }

// With the runtime's lock held, within a TracedCall. `operation` is the last of `stream`.
void trace_issue(const Stream& stream, const Operation& operation);
void trace_wait(const std::vector<Mark>& marks);

}  // namespace simulated_gpu
