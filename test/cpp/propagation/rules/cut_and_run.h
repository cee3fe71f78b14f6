// Checks rows by numbers. The inputs are cut as a row says, and the operator runs on every rank's parts. Its
// outputs have to be the parts of the whole output, or to reduce to it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "layout/shards.h"
#include "propagation/rules/calls.h"
#include "propagation/rules/numbers.h"

namespace funcol::test {

// Integers small enough for exact sums and products, and multiples of 180, so that averages are exact, too.
inline Numbers random_numbers(const std::vector<int64_t>& shape, std::mt19937& random) {
  Numbers numbers{shape, {}};
  std::uniform_int_distribution<int> digit(-4, 4);
  for (int64_t i = 0; i < num_elements(shape); ++i) {
    numbers.values.push_back(180 * digit(random));
  }
  return numbers;
}

// Indices of a dim of this size.
inline Numbers random_indices(const std::vector<int64_t>& shape, int64_t size, std::mt19937& random) {
  Numbers numbers{shape, {}};
  std::uniform_int_distribution<int64_t> index(0, size - 1);
  for (int64_t i = 0; i < num_elements(shape); ++i) {
    numbers.values.push_back(static_cast<double>(index(random)));
  }
  return numbers;
}

// The indices from the begin of the interval that a rank holds; 0 for indices outside.
inline Numbers masked_part(const Numbers& indices, const Interval& held) {
  Numbers part = indices;
  for (auto& value : part.values) {
    const auto index = static_cast<int64_t>(value);
    value = held.begin <= index && index < held.end() ? static_cast<double>(index - held.begin) : 0;
  }
  return part;
}

// The output of indices with 0 where an index is outside of the interval that the rank holds. Each index
// gives one output element, or several.
inline Numbers without_masked(Numbers output, const Numbers& indices, const Interval& held) {
  const size_t of_each = indices.values.empty() ? 0 : output.values.size() / indices.values.size();
  for (size_t i = 0; i < output.values.size(); ++i) {
    const auto index = static_cast<int64_t>(indices.values[i / of_each]);
    output.values[i] = held.begin <= index && index < held.end() ? output.values[i] : 0;
  }
  return output;
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

// Numbers for each rank, whose reduction is `whole`.
inline std::vector<Numbers> partial_parts(const Numbers& whole, PartialOp op, int64_t num_ranks,
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

// The placement with a split factor in place of kAnySplit.
inline Placement with_split(Placement placement, int64_t split_factor) {
  if (placement.is_shard() && placement.split_factor == kAnySplit) {
    placement.split_factor = split_factor;
  }
  return placement;
}

// Runs an operator by one row on one mesh axis, and compares the ranks' outputs with the output of the whole
// tensors. Tensors of integers are indices; a mask is made of the last tensor.
class RowCheck {
 public:
  RowCheck(const OpCall& call, const Row& row, const Rows& rows, int64_t num_ranks, int64_t split_factor)
      : call_(call),
        row_(row),
        rows_(rows),
        split_factor_(split_factor),
        mesh_{{num_ranks}, {}, {}},
        parts_(num_ranks) {}

  // Passes if the row is not legal on this axis.
  ::testing::AssertionResult run(const Operator& op) {
    for (size_t i = 0; i < call_.tensors.size(); ++i) {
      add_input(i);
    }
    const auto& shape = call_.outputs.at(0)->shape;
    const auto placement = with_split(*row_.outputs.at(0), split_factor_);
    const auto layout = layout_of(placement, static_cast<int64_t>(shape.size()));
    composition_.outputs.emplace_back(layout);
    if (rows_.is_legal && !rows_.is_legal(call_, composition_, mesh_)) {
      return ::testing::AssertionSuccess();
    }
    const Numbers expected = op(wholes_, shape);
    std::vector<Numbers> outputs;
    for (int64_t rank = 0; rank < num_ranks(); ++rank) {
      outputs.push_back(op(parts_[rank], local_shape(layout, mesh_, shape, {rank})));
      if (placement.mask != 0) {
        outputs.back() = without_masked(outputs.back(), wholes_.back(), held(rank));
      }
      if (!placement.is_partial() && outputs.back() != local_part(expected, layout, mesh_, {rank})) {
        return ::testing::AssertionFailure()
               << to_text(row_) << " with split factor " << split_factor_ << ": rank " << rank << " is wrong";
      }
    }
    if (placement.is_partial() && reduction_of(outputs, placement.op) != expected) {
      return ::testing::AssertionFailure()
             << to_text(row_) << ": the ranks' parts do not reduce to the whole";
    }
    return ::testing::AssertionSuccess();
  }

 private:
  int64_t num_ranks() const { return mesh_.sizes[0]; }

  Layout layout_of(const Placement& placement, int64_t num_dims) const {
    return make_layout("test", {placement}, {}, mesh_, num_dims);
  }

  // The indices that a rank holds of the masked dim.
  Interval held(int64_t rank) const {
    const auto& [shape, dim] = rows_.masks.at(0);
    const auto cut = layout_of(Placement::shard(dim), static_cast<int64_t>(shape.size()));
    const auto intervals = local_indices(cut, mesh_, dim, shape[dim], {rank});
    return intervals.empty() ? Interval{} : intervals.front();
  }

  void add_input(size_t i) {
    const auto& meta = call_.tensors[i];
    const auto placement = with_split(row_.inputs[i], split_factor_);
    const auto layout = layout_of(placement, meta.num_dims());
    composition_.inputs.push_back(layout);
    const bool is_index = meta.dtype == Dtype::kInt64;
    const auto whole = is_index
                           ? random_indices(meta.shape, rows_.masks.at(0).shape[rows_.masks[0].dim], random_)
                           : random_numbers(meta.shape, random_);
    const auto partials = placement.is_partial() && placement.mask == 0
                              ? partial_parts(whole, placement.op, num_ranks(), random_)
                              : std::vector<Numbers>{};
    for (int64_t rank = 0; rank < num_ranks(); ++rank) {
      parts_[rank].push_back(placement.mask != 0 ? masked_part(whole, held(rank))
                             : !partials.empty() ? partials[rank]
                                                 : local_part(whole, layout, mesh_, {rank}));
    }
    wholes_.push_back(whole);
  }

  static Numbers reduction_of(const std::vector<Numbers>& parts, PartialOp op) {
    Numbers result = parts[0];
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      for (size_t i = 0; i < result.values.size(); ++i) {
        result.values[i] = reduced(op, result.values[i], parts[rank].values.at(i));
      }
    }
    for (auto& value : result.values) {
      value /= op == PartialOp::kAvg ? static_cast<double>(parts.size()) : 1;
    }
    return result;
  }

  const OpCall& call_;
  const Row& row_;
  const Rows& rows_;
  const int64_t split_factor_;
  const Mesh mesh_;
  std::mt19937 random_{7};
  Composition composition_;
  std::vector<Numbers> wholes_;
  std::vector<std::vector<Numbers>> parts_;  // [rank][tensor]
};

// Checks all rows of the call on axes of 2 and of 3 ranks, with plain and with strided shards.
inline ::testing::AssertionResult all_rows_are_right(const OpCall& call, const Operator& op) {
  const auto rows = rows_of(call);
  for (const auto& row : rows.rows) {
    const auto is_bitwise = [](const auto& placement) {
      return placement.is_partial() && placement.op >= PartialOp::kBand;
    };
    // A row with any_mask() stands for rows that only a call with a masked partial has.
    if (is_bitwise(*row.outputs.at(0)) || any_placement(row, is_any_mask)) {
      continue;
    }
    for (const int64_t num_ranks : {2, 3}) {
      for (const int64_t split_factor : {1, 2}) {
        if (const auto result = RowCheck(call, row, rows, num_ranks, split_factor).run(op); !result) {
          return result;
        }
      }
    }
  }
  return rows.rows.empty() ? ::testing::AssertionFailure() << call.op << " has no rows"
                           : ::testing::AssertionSuccess();
}

}  // namespace funcol::test
