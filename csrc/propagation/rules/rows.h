// How rules write their rows down.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "layout/shards.h"
#include "propagation/rule.h"

namespace funcol {

inline Placement replicate() { return Placement::replicate(); }
inline Placement partial(PartialOp op = PartialOp::kSum) { return Placement::partial(op); }
// By the `number`-th of Rows::masks.
inline Placement masked(size_t number) { return Placement::partial(PartialOp::kSum, new_mask(number)); }

// Reductions that sums and products with constants commute with, that an order is enough for, and all.
inline constexpr std::array kLinearOps{PartialOp::kSum, PartialOp::kAvg};
inline constexpr std::array kOrderOps{PartialOp::kMax, PartialOp::kMin};
inline constexpr std::array kAllPartialOps{PartialOp::kSum, PartialOp::kAvg,     PartialOp::kMin,
                                           PartialOp::kMax, PartialOp::kProduct, PartialOp::kBand,
                                           PartialOp::kBor, PartialOp::kBxor};

// The rows of a call as they are added one by one. What the call does not return gets no placement.
class RowList {
 public:
  explicit RowList(const OpCall& call) : call_(call) {}

  // Throws std::logic_error if the placements are not as many as the call's outputs and tensors.
  void add(const std::vector<Placement>& outputs, std::vector<Placement> inputs);
  // All outputs placed alike.
  void add(const Placement& output, std::vector<Placement> inputs);
  // All outputs and all inputs placed alike.
  void add_alike(const Placement& placement);
  // A row of an operator that computes, and does so right for real numbers: left out if the dtypes have no
  // such arithmetic. Averages of integers are rounded, sums of bools are no sums, complex numbers have no
  // order, unsigned ones none that differences keep.
  void add_arithmetic(const Placement& output, std::vector<Placement> inputs);

  std::vector<Row> take() { return std::move(rows_); }

 private:
  const OpCall& call_;
  std::vector<Row> rows_;
};

// The names of the arguments that the tensors of a call came by: as many as OpCall::tensors.
std::vector<std::string_view> tensor_names(const OpCall& call);

using NamedPlacements = std::initializer_list<std::pair<std::string_view, Placement>>;
// Placements for the call's tensors: those of the arguments named, Replicate for others. Names of tensors
// that this call lacks (optional ones) are passed over.
std::vector<Placement> inputs_by_name(const OpCall& call, NamedPlacements named);

// What the call returns first. Throws std::invalid_argument naming the operator if that is no tensor.
const TensorMeta& first_output(const OpCall& call);
// Where a composition has that.
const Layout& first_output(const OpCall& call, const Composition& composition);

// Whether the call was given a tensor as this argument.
bool has_tensor(const OpCall& call, std::string_view name);
// The argument's value; `otherwise` if there is no such argument, or none was given.
bool flag_or(const OpCall& call, std::string_view name, bool otherwise);
int64_t integer_or(const OpCall& call, std::string_view name, int64_t otherwise);
// Nothing unless the argument is there and is a real number.
std::optional<double> real_number(const OpCall& call, std::string_view name);

// The argument's dim counted from 0, for a tensor of so many dims.
int64_t dim_argument(const OpCall& call, std::string_view name, int64_t num_dims);

}  // namespace funcol
