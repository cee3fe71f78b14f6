// Which dims of a tensor become which when it is read in another shape, row by row.
#pragma once

#include <cstdint>
#include <vector>

#include "layout/shards.h"

namespace funcol {

// Dims of both shapes, neighbours each, that hold the same indices. [2, 3, 4] as [6, 2, 2] is {0, 1 -> 0} and
// {2 -> 1, 2}. Dims of size 1 may stand alone on either side.
struct DimGroup {
  std::vector<int64_t> from;
  std::vector<int64_t> to;

  friend bool operator==(const DimGroup&, const DimGroup&) = default;
};

// Of shapes with as many elements, at least one.
std::vector<DimGroup> dim_groups(const std::vector<int64_t>& from, const std::vector<int64_t>& to);

// The elements of the dims taken as one, when of each dim these indices are held: in the order in which they
// lie in memory.
Intervals flat_indices(const std::vector<int64_t>& sizes, const std::vector<Intervals>& held);

// The divisors of a positive number, ascending.
std::vector<int64_t> divisors(int64_t number);

}  // namespace funcol
