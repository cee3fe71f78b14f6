#include "simulated_ranks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>

#include "layout/hash.h"

namespace funcol::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double of_bits(int64_t bits) { return static_cast<double>(bits); }
int64_t bits_of(double number) { return static_cast<int64_t>(number); }

// The part of `whole` that rank `index` of `num_ranks` holds.
class Part {
 public:
  Part(const Placement& placement, double whole, int64_t num_ranks, uint64_t noise)
      : placement_(placement), whole_(whole), num_ranks_(num_ranks), noise_(noise) {}

  double of(int64_t index) const {
    const bool holds = index == holder();
    const bool last = index == num_ranks_ - 1;
    switch (placement_.op) {
      case PartialOp::kSum:
        return placement_.is_norm() ? power_part(index) : last ? whole_ - noise_before(index) : noise(index);
      case PartialOp::kAvg:
        return last ? whole_ * static_cast<double>(num_ranks_) - noise_before(index) : noise(index);
      case PartialOp::kMax:
        return holds ? whole_ : whole_ - noise(index);
      case PartialOp::kMin:
        return holds ? whole_ : whole_ + noise(index);
      case PartialOp::kProduct:
        return holds ? whole_ : 1;
      case PartialOp::kBand:
        return holds ? whole_ : of_bits(bits_of(whole_) | bits_of(noise(index)));
      case PartialOp::kBor:
        return holds ? whole_ : of_bits(bits_of(whole_) & bits_of(noise(index)));
      case PartialOp::kBxor:
        return last ? of_bits(bits_of(whole_) ^ bits_before(index)) : noise(index);
    }
    throw std::logic_error("unknown reduction");
  }

  double neutral(int64_t index) const {
    return index == 0 || placement_.op == PartialOp::kAvg ? whole_ : neutral_element(placement_.op);
  }

 private:
  int64_t holder() const { return static_cast<int64_t>(noise_ >> 40) % num_ranks_; }
  double noise(int64_t index) const { return kUnit * static_cast<double>(1 + (noise_ >> (3 * index)) % 5); }
  // A norm's parts are norms of parts: one rank has all.
  double power_part(int64_t index) const { return index == holder() ? whole_ : 0; }
  double noise_before(int64_t index) const {
    double sum = 0;
    for (int64_t i = 0; i < index; ++i) {
      sum += noise(i);
    }
    return sum;
  }
  int64_t bits_before(int64_t index) const {
    int64_t bits = 0;
    for (int64_t i = 0; i < index; ++i) {
      bits ^= bits_of(noise(i));
    }
    return bits;
  }

  const Placement& placement_;
  const double whole_;
  const int64_t num_ranks_;
  const uint64_t noise_;
};

bool is_pending(const Layout& layout, const Mesh& mesh, int64_t axis) {
  return layout.placements[axis].is_partial() && mesh.sizes[axis] > 1;
}

double combined(PartialOp op, double a, double b) {
  switch (op) {
    case PartialOp::kSum:
    case PartialOp::kAvg:
      return a + b;
    case PartialOp::kMax:
      return std::max(a, b);
    case PartialOp::kMin:
      return std::min(a, b);
    case PartialOp::kProduct:
      return a * b;
    case PartialOp::kBand:
      return of_bits(bits_of(a) & bits_of(b));
    case PartialOp::kBor:
      return of_bits(bits_of(a) | bits_of(b));
    case PartialOp::kBxor:
      return of_bits(bits_of(a) ^ bits_of(b));
  }
  throw std::logic_error("unknown reduction");
}

bool is_near(double a, double b, double most) {
  return a == b || (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= most;
}

// The ranks that differ from `first` on `axes` alone.
std::vector<size_t> group_of(const Coordinate& first, const std::vector<int64_t>& axes,
                             const std::vector<Coordinate>& ranks) {
  std::vector<size_t> group;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    Coordinate moved = ranks[rank];
    for (const int64_t axis : axes) {
      moved[axis] = 0;
    }
    if (moved == first) {
      group.push_back(rank);
    }
  }
  return group;
}

double largest(const Numbers& numbers) {
  double most = 1;
  for (const double value : numbers.values) {
    most = std::isfinite(value) ? std::max(most, std::abs(value)) : most;
  }
  return most;
}

}  // namespace

double neutral_element(PartialOp op) {
  switch (op) {
    case PartialOp::kMax:
      return -kInfinity;
    case PartialOp::kMin:
      return kInfinity;
    case PartialOp::kProduct:
      return 1;
    case PartialOp::kBand:
      return -1;
    default:
      return 0;
  }
}

RankTensors distributed(const Numbers& whole, const Layout& layout, const Mesh& mesh, uint64_t noise,
                        PartialForm form) {
  RankTensors tensors;
  for (const auto& coordinate : coordinates(mesh)) {
    Numbers numbers = whole;
    for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
      if (!is_pending(layout, mesh, axis)) {
        continue;
      }
      for (size_t i = 0; i < numbers.values.size(); ++i) {
        Hash hash;
        hash.add(noise);
        hash.add(i);
        for (int64_t before = 0; before <= axis; ++before) {
          hash.add(before < axis && is_pending(layout, mesh, before) ? coordinate[before] + 1 : 0);
        }
        const Part part(layout.placements[axis], numbers.values[i], mesh.sizes[axis], hash.value());
        numbers.values[i] =
            form == PartialForm::kNoise ? part.of(coordinate[axis]) : part.neutral(coordinate[axis]);
      }
    }
    tensors.push_back(local_part(numbers, layout, mesh, coordinate));
  }
  return tensors;
}

double reduction_of(const std::vector<double>& numbers, const std::vector<int64_t>& axes,
                    const Layout& layout, const Mesh& mesh) {
  if (axes.empty()) {
    return numbers.front();
  }
  const auto& first = layout.placements[axes.front()];
  if (first.is_norm()) {
    double sum = 0;
    for (const double number : numbers) {
      sum += std::pow(std::abs(number), first.norm.value);
    }
    return std::pow(sum, 1 / first.norm.value);
  }
  double result = numbers.front();
  for (size_t i = 1; i < numbers.size(); ++i) {
    result = combined(first.op, result, numbers[i]);
  }
  for (const int64_t axis : axes) {
    result /= layout.placements[axis].op == PartialOp::kAvg ? static_cast<double>(mesh.sizes[axis]) : 1;
  }
  return result;
}

std::string difference(const RankTensors& tensors, const Numbers& whole, const Layout& layout,
                       const Mesh& mesh, double tolerance) {
  const auto ranks = coordinates(mesh);
  std::vector<int64_t> axes;
  for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
    if (is_pending(layout, mesh, axis)) {
      axes.push_back(axis);
    }
  }
  const double most = tolerance * largest(whole);
  for (const auto& first : ranks) {
    const auto group = group_of(first, axes, ranks);
    if (group.empty()) {
      continue;  // reduced with the rank at the begin of the partial axes
    }
    const Numbers expected = local_part(whole, layout, mesh, first);
    for (const size_t rank : group) {
      if (tensors[rank].shape != expected.shape) {
        return "rank " + joined(ranks[rank]) + " has shape " + joined(tensors[rank].shape) + ", not " +
               joined(expected.shape);
      }
    }
    for (size_t i = 0; i < expected.values.size(); ++i) {
      std::vector<double> numbers;
      for (const size_t rank : group) {
        numbers.push_back(tensors[rank].values[i]);
      }
      const double reduced = reduction_of(numbers, axes, layout, mesh);
      if (!is_near(reduced, expected.values[i], most)) {
        return "element " + std::to_string(i) + " of rank " + joined(first) + " is " +
               std::to_string(reduced) + ", not " + std::to_string(expected.values[i]);
      }
    }
  }
  return "";
}

}  // namespace funcol::test
