// Reshapes: which dims of a tensor become which dims when it is read in another shape, in row-major order.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/shards.h"

namespace funcol {

// Neighboring dims of one shape that become neighboring dims of the other. [2, 3, 4] as [6, 2, 2] has the
// groups {0, 1 -> 0} and {2 -> 1, 2}. A dim of size 1 may be alone in its group.
struct DimGroup {
  std::vector<int64_t> from;
  std::vector<int64_t> to;

  friend bool operator==(const DimGroup&, const DimGroup&) = default;
};

// Returns the groups of two shapes with equally many elements, at least one.
std::vector<DimGroup> dim_groups(const std::vector<int64_t>& from, const std::vector<int64_t>& to);

// Returns a rank's indices of flattened dims, in memory order. `held` are the rank's indices of each dim.
Intervals flat_indices(const std::vector<int64_t>& sizes, const std::vector<Intervals>& held);

// Returns the divisors of a positive number, ascending.
std::vector<int64_t> divisors(int64_t number);

}  // namespace funcol
