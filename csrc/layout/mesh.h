// A mesh of ranks, with axis sizes and names: PyTorch's DeviceMesh without the rank numbers.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <vector>

namespace funcol {

// A set of mesh axes: bit i stands for axis i.
using AxisSet = uint32_t;

inline AxisSet axis_set(int64_t axis) { return AxisSet{1} << axis; }
inline bool contains(AxisSet axes, int64_t axis) { return (axes >> axis & 1) != 0; }
inline int num_axes(AxisSet axes) { return std::popcount(axes); }

// The index of a rank on each mesh axis.
using Coordinate = std::vector<int64_t>;

struct Mesh {
  std::vector<int64_t> sizes;      // ranks on each axis
  std::vector<std::string> names;  // of the axes; empty if they have none
  std::vector<AxisSet> merged;     // sets of two or more axes with one process group over all of their ranks
  int64_t ranks_per_host = 1;      // neighbors, counted along the last axis first, share a host

  int64_t num_axes() const { return static_cast<int64_t>(sizes.size()); }

  int64_t num_ranks() const {
    int64_t product = 1;
    for (const int64_t size : sizes) {
      product *= size;
    }
    return product;
  }

  // Returns the size of a group that spans `axes` alone. Group ranks count up along the last axis first.
  int64_t num_ranks(AxisSet axes) const {
    int64_t product = 1;
    for (int64_t axis = 0; axis < num_axes(); ++axis) {
      product *= contains(axes, axis) ? sizes[axis] : 1;
    }
    return product;
  }

  // Returns the coordinate of the rank at `place`. Places count up along the last axis first.
  Coordinate coordinate(int64_t place) const {
    Coordinate coordinate(sizes.size());
    for (size_t axis = sizes.size(); axis-- > 0;) {
      coordinate[axis] = place % sizes[axis];
      place /= sizes[axis];
    }
    return coordinate;
  }
  // Returns the place of the rank at `coordinate`.
  int64_t place(const Coordinate& coordinate) const {
    int64_t place = 0;
    for (size_t axis = 0; axis < sizes.size(); ++axis) {
      place = place * sizes[axis] + coordinate[axis];
    }
    return place;
  }

  // Returns true if one process group has the ranks along `axes`, of which there is at least one.
  bool has_group(AxisSet axes) const {
    return funcol::num_axes(axes) == 1 || std::ranges::find(merged, axes) != merged.end();
  }

  // Returns the name of the axis, or its number if the axes have no names.
  std::string name(int64_t axis) const { return names.empty() ? std::to_string(axis) : names[axis]; }
  // Returns the names of `axes`, each in `quote`, with `separator` between them.
  std::string names_of(AxisSet axes, const std::string& separator, const std::string& quote = "") const {
    std::string text;
    for (int64_t axis = 0; axis < num_axes(); ++axis) {
      if (contains(axes, axis)) {
        text += text.empty() ? "" : separator;
        text += quote;
        text += name(axis);
        text += quote;
      }
    }
    return text;
  }

  friend bool operator==(const Mesh&, const Mesh&) = default;
};

}  // namespace funcol
