// Whether rows are right, by numbers: inputs are cut as a row says, the operator runs on every rank's part,
// and what it gives is compared with the rank's part of the whole result, or is reduced to it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "layout/shards.h"
#include "propagation/rules/calls.h"

namespace funcol::test {

// A dense tensor of numbers, the last dim counting up first.
struct Numbers {
  std::vector<int64_t> shape;
  std::vector<double> values;

  friend bool operator==(const Numbers&, const Numbers&) = default;
};

inline int64_t num_elements(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// The index of an element on every dim.
inline std::vector<int64_t> index_of(int64_t element, const std::vector<int64_t>& shape) {
  std::vector<int64_t> index(shape.size());
  for (size_t dim = shape.size(); dim-- > 0;) {
    index[dim] = element % shape[dim];
    element /= shape[dim];
  }
  return index;
}

inline int64_t element_at(const std::vector<int64_t>& index, const std::vector<int64_t>& shape) {
  int64_t element = 0;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    element = element * shape[dim] + index[dim];
  }
  return element;
}

// Small integers, so that sums are exact; multiples of 180, so that averages are.
inline Numbers random_numbers(const std::vector<int64_t>& shape, std::mt19937& random) {
  Numbers numbers{shape, {}};
  std::uniform_int_distribution<int> digit(-4, 4);
  for (int64_t i = 0; i < num_elements(shape); ++i) {
    numbers.values.push_back(180 * digit(random));
  }
  return numbers;
}

// Numbers of elements among so many.
inline Numbers random_indices(const std::vector<int64_t>& shape, int64_t size, std::mt19937& random) {
  Numbers numbers{shape, {}};
  std::uniform_int_distribution<int64_t> index(0, size - 1);
  for (int64_t i = 0; i < num_elements(shape); ++i) {
    numbers.values.push_back(static_cast<double>(index(random)));
  }
  return numbers;
}

// Indices among those that a rank holds, 0 for others.
inline Numbers masked_part(const Numbers& indices, const Interval& held) {
  Numbers part = indices;
  for (auto& value : part.values) {
    const auto index = static_cast<int64_t>(value);
    value = held.begin <= index && index < held.end() ? static_cast<double>(index - held.begin) : 0;
  }
  return part;
}

// With 0 for what was made of indices that the rank does not hold: an element of each, or several.
inline Numbers without_masked(Numbers output, const Numbers& indices, const Interval& held) {
  const size_t of_each = indices.values.empty() ? 0 : output.values.size() / indices.values.size();
  for (size_t i = 0; i < output.values.size(); ++i) {
    const auto index = static_cast<int64_t>(indices.values[i / of_each]);
    output.values[i] = held.begin <= index && index < held.end() ? output.values[i] : 0;
  }
  return output;
}

inline Numbers local_part(const Numbers& whole, const Layout& layout, const Mesh& mesh,
                          const Coordinate& coordinate) {
  std::vector<std::vector<int64_t>> held(whole.shape.size());
  Numbers part;
  for (size_t dim = 0; dim < whole.shape.size(); ++dim) {
    for (const auto& interval :
         local_indices(layout, mesh, static_cast<int64_t>(dim), whole.shape[dim], coordinate)) {
      for (int64_t i = interval.begin; i < interval.end(); ++i) {
        held[dim].push_back(i);
      }
    }
    part.shape.push_back(static_cast<int64_t>(held[dim].size()));
  }
  for (int64_t element = 0; element < num_elements(part.shape); ++element) {
    auto index = index_of(element, part.shape);
    for (size_t dim = 0; dim < index.size(); ++dim) {
      index[dim] = held[dim][index[dim]];
    }
    part.values.push_back(whole.values[element_at(index, whole.shape)]);
  }
  return part;
}

inline double reduced(PartialOp op, double a, double b) {
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
    default:
      throw std::logic_error("no numbers for this reduction");
  }
}

// Numbers for each rank that reduce to the whole.
inline std::vector<Numbers> pending_parts(const Numbers& whole, PartialOp op, int64_t num_ranks,
                                          std::mt19937& random) {
  std::vector<Numbers> parts;
  Numbers rest = whole;
  std::uniform_int_distribution<int> digit(1, 5);
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    Numbers part = whole;
    for (size_t i = 0; i < part.values.size(); ++i) {
      const double noise = 180 * digit(random);
      auto& value = part.values[i];
      const bool is_last = rank == num_ranks - 1;
      if (op == PartialOp::kSum) {
        value = is_last ? rest.values[i] : noise;
      } else if (op == PartialOp::kAvg) {
        value = is_last ? rest.values[i] + static_cast<double>(num_ranks - 1) * whole.values[i] : noise;
      } else if (op == PartialOp::kMax) {
        value -= is_last ? 0 : noise;
      } else if (op == PartialOp::kMin) {
        value += is_last ? 0 : noise;
      } else {
        value = is_last ? value : 1;
      }
      rest.values[i] -= value;
    }
    parts.push_back(std::move(part));
  }
  return parts;
}

using Operator =
    std::function<Numbers(const std::vector<Numbers>&, const std::vector<int64_t>& output_shape)>;

// The row with a split factor in place of kAnySplit.
inline Placement with_split(Placement placement, int64_t split_factor) {
  if (placement.is_shard() && placement.split_factor == kAnySplit) {
    placement.split_factor = split_factor;
  }
  return placement;
}

// Whether the row is right on one axis of so many ranks; one that is not legal there is. Integers are
// indices, and what has a mask is made of the last tensor.
inline ::testing::AssertionResult is_right(const OpCall& call, const Row& row, const Rows& rows,
                                           const Operator& op, int64_t num_ranks, int64_t split_factor) {
  const Mesh mesh{{num_ranks}, {}, {}};
  std::mt19937 random(7);
  Composition composition;
  std::vector<Numbers> wholes;
  std::vector<std::vector<Numbers>> parts(num_ranks);
  // What each rank holds of the dim that indices are into.
  const auto held = [&](int64_t rank) {
    const auto& [shape, dim] = rows.masks.at(0);
    const auto cut =
        make_layout("test", {Placement::shard(dim)}, {}, mesh, static_cast<int64_t>(shape.size()));
    const auto intervals = local_indices(cut, mesh, dim, shape[dim], {rank});
    return intervals.empty() ? Interval{} : intervals.front();
  };
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const auto placement = with_split(row.inputs[i], split_factor);
    const auto layout = make_layout("test", {placement}, {}, mesh, call.tensors[i].num_dims());
    composition.inputs.push_back(layout);
    const bool is_index = call.tensors[i].dtype == Dtype::kInt64;
    wholes.push_back(
        is_index ? random_indices(call.tensors[i].shape, rows.masks.at(0).shape[rows.masks[0].dim], random)
                 : random_numbers(call.tensors[i].shape, random));
    if (placement.mask != 0) {
      for (int64_t rank = 0; rank < num_ranks; ++rank) {
        parts[rank].push_back(masked_part(wholes[i], held(rank)));
      }
      continue;
    }
    const auto pending = placement.is_partial() ? pending_parts(wholes[i], placement.op, num_ranks, random)
                                                : std::vector<Numbers>{};
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      parts[rank].push_back(placement.is_partial() ? pending[rank]
                                                   : local_part(wholes[i], layout, mesh, {rank}));
    }
  }
  const auto& meta = *call.outputs.at(0);
  const auto placement = with_split(*row.outputs.at(0), split_factor);
  const auto layout = make_layout("test", {placement}, {}, mesh, meta.num_dims());
  composition.outputs.emplace_back(layout);
  if (rows.is_legal && !rows.is_legal(call, composition, mesh)) {
    return ::testing::AssertionSuccess();
  }
  const Numbers expected = op(wholes, meta.shape);
  Numbers sum;
  for (int64_t rank = 0; rank < num_ranks; ++rank) {
    auto local = op(parts[rank], local_shape(layout, mesh, meta.shape, {rank}));
    if (placement.mask != 0) {
      local = without_masked(local, wholes.back(), held(rank));
    }
    if (!placement.is_partial() && local != local_part(expected, layout, mesh, {rank})) {
      return ::testing::AssertionFailure()
             << to_text(row) << " with split factor " << split_factor << ": rank " << rank << " is wrong";
    }
    if (rank == 0) {
      sum = local;
    } else if (placement.is_partial()) {
      for (size_t i = 0; i < sum.values.size(); ++i) {
        sum.values[i] = reduced(placement.op, sum.values[i], local.values.at(i));
      }
    }
  }
  if (placement.is_partial() && placement.op == PartialOp::kAvg) {
    for (auto& value : sum.values) {
      value /= static_cast<double>(num_ranks);
    }
  }
  if (placement.is_partial() && sum != expected) {
    return ::testing::AssertionFailure() << to_text(row) << ": the ranks' parts do not reduce to the whole";
  }
  return ::testing::AssertionSuccess();
}

// Whether all rows of the call are right on axes of 2 and of 3 ranks, plainly cut and in pieces.
inline ::testing::AssertionResult all_rows_are_right(const OpCall& call, const Operator& op) {
  const auto rows = rows_of(call);
  for (const auto& row : rows.rows) {
    const auto is_bitwise = [](const auto& placement) {
      return placement.is_partial() && placement.op >= PartialOp::kBand;
    };
    if (is_bitwise(*row.outputs.at(0))) {
      continue;
    }
    for (const int64_t num_ranks : {2, 3}) {
      for (const int64_t split_factor : {1, 2}) {
        if (const auto result = is_right(call, row, rows, op, num_ranks, split_factor); !result) {
          return result;
        }
      }
    }
  }
  return rows.rows.empty() ? ::testing::AssertionFailure() << call.op << " has no rows"
                           : ::testing::AssertionSuccess();
}

}  // namespace funcol::test
