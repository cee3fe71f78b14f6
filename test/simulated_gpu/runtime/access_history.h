// Last uses of every byte: finds two uses that conflict and that have no order.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "simulated_gpu.h"

namespace simulated_gpu {

// An operation as its reports name it. Reads of one `line` (a stream, or a node of a graph) replace each
// other.
struct Issued {
  std::string name;
  uint64_t line = 0;
  uint64_t number = 0;  // on its line, from 1
  Kind kind = Kind::kKernel;
  std::shared_ptr<const IssuePlace> place = nullptr;

  std::string text() const;  // name, numbers, and the stack where it was issued
};
using IssuedPointer = std::shared_ptr<const Issued>;

struct Conflict {
  IssuedPointer earlier, later;
  bool earlier_writes = false, later_writes = false;
  Range bytes;

  std::string text() const;
};

// Worked case: `a` writes [0, 8), `b` reads [4, 6). The bytes lie in three segments then: [0, 4) and [6, 8)
// last written by `a`, [4, 6) last written by `a` and read by `b`. A write of [0, 8) conflicts with `a` and
// `b`.
class AccessHistory {
 public:
  // Returns true if `earlier` is known to come before the use that is being added.
  using IsOrdered = std::function<bool(const Issued& earlier)>;

  // Adds one use. Returns the first earlier one that conflicts with it (one of both writes) and is not
  // ordered.
  std::optional<Conflict> add(const Range& range, bool writes, const IssuedPointer& by,
                              const IsOrdered& is_ordered);

  // Memory that is no more.
  void forget(const Range& range);

 private:
  struct Segment {
    uintptr_t end;
    IssuedPointer written;
    std::vector<IssuedPointer> read;  // since it was written; the last of each line

    void add_reader(const IssuedPointer& reader);
  };
  using Segments = std::map<uintptr_t, Segment>;

  // Makes a segment begin at `address` if one holds it.
  void split(uintptr_t address);

  Segments segments_;  // by their beginnings
};

}  // namespace simulated_gpu
