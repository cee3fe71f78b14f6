// A mesh of ranks, as far as layouts and plans need to know it: PyTorch's DeviceMesh without its ranks.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

namespace funcol {

// A set of mesh axes, a bit an axis.
using AxisSet = uint32_t;

inline AxisSet axis_set(int64_t axis) { return AxisSet{1} << axis; }
inline bool contains(AxisSet axes, int64_t axis) { return (axes >> axis & 1) != 0; }
inline int num_axes(AxisSet axes) { return std::popcount(axes); }

// Where a rank stands: its index on each axis.
using Coordinate = std::vector<int64_t>;

struct Mesh {
  std::vector<int64_t> sizes;      // ranks on each axis
  std::vector<std::string> names;  // of the axes; empty if they have none
  std::vector<AxisSet> merged;     // sets of two or more axes whose ranks have a process group of their own
  int64_t ranks_per_host = 1;      // of those that stand next to each other, the last axis first

  int64_t num_axes() const { return static_cast<int64_t>(sizes.size()); }

  int64_t num_ranks() const {
    int64_t product = 1;
    for (const int64_t size : sizes) {
      product *= size;
    }
    return product;
  }

  // Ranks that differ on these axes alone. In a group of them the rank counts up along the last axis first.
  int64_t num_ranks(AxisSet axes) const {
    int64_t product = 1;
    for (int64_t axis = 0; axis < num_axes(); ++axis) {
      product *= contains(axes, axis) ? sizes[axis] : 1;
    }
    return product;
  }

  // The axis' name, or its number if it has none.
  std::string name(int64_t axis) const { return names.empty() ? std::to_string(axis) : names[axis]; }

  friend bool operator==(const Mesh&, const Mesh&) = default;
};

}  // namespace funcol
