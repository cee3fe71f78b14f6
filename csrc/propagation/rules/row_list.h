// Helpers for rules: a list of rows, and the arguments of a call.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "layout/shards.h"
#include "propagation/rule.h"

namespace funcol {

inline Placement replicate() { return Placement::replicate(); }
inline Placement partial(PartialOp op = PartialOp::kSum) { return Placement::partial(op); }
// Returns a partial masked by Rows::masks[number].
inline Placement masked(size_t number) { return Placement::partial(PartialOp::kSum, new_mask(number)); }

// The reductions that commute with sums and with products by constants.
inline constexpr std::array kLinearOps{PartialOp::kSum, PartialOp::kAvg};
// The reductions that commute with increasing functions.
inline constexpr std::array kOrderOps{PartialOp::kMax, PartialOp::kMin};
// The reductions that leave a number unchanged if all ranks hold it.
inline constexpr std::array kOpsKeepingConstants{PartialOp::kAvg, PartialOp::kMax, PartialOp::kMin};
inline constexpr std::array kAllPartialOps{PartialOp::kSum, PartialOp::kAvg,     PartialOp::kMin,
                                           PartialOp::kMax, PartialOp::kProduct, PartialOp::kBand,
                                           PartialOp::kBor, PartialOp::kBxor};

using LegalityCheck = decltype(Rows::is_legal);
using PartialOps = std::span<const PartialOp>;
using ArgumentNames = std::initializer_list<std::string_view>;
// Placements of tensors by the names of their arguments. Other tensors of the call are replicated; arguments
// that hold no tensor are skipped.
using NamedPlacements = std::initializer_list<std::pair<std::string_view, Placement>>;

// A list of the rows of a call. Outputs that are not tensors get no placement.
class RowList {
 public:
  explicit RowList(const OpCall& call) : call_(call) {}

  const OpCall& call() const { return call_; }

  // Adds a row. A single `output` applies to all outputs. Throws std::logic_error if the numbers of
  // placements differ from those of the call's outputs and tensors, or if the call lacks a named argument.
  void add(const std::vector<Placement>& outputs, std::vector<Placement> inputs);
  void add(const std::vector<Placement>& outputs, NamedPlacements inputs);
  void add(const Placement& output, std::vector<Placement> inputs);
  void add(const Placement& output, NamedPlacements inputs);

  // Adds a row of an operator that computes with elements, unless the dtypes have no such arithmetic:
  // averages of integers are rounded, sums of bools are not sums, complex numbers have no order, and
  // differences do not keep the order of unsigned numbers.
  void add_arithmetic(const Placement& output, std::vector<Placement> inputs);
  void add_arithmetic(const Placement& output, NamedPlacements inputs);

  // Adds a row with one placement for all outputs and all inputs, or for all outputs and these arguments.
  void add_same_placement(const Placement& placement);
  void add_same_placement(const Placement& placement, ArgumentNames arguments);

  // Adds add_same_placement(partial(op), ...) for each of `ops`.
  void add_partials(PartialOps ops);
  void add_partials(PartialOps ops, ArgumentNames arguments);
  // Adds the same for an operator that computes with elements, as in add_arithmetic().
  void add_arithmetic_partials(PartialOps ops);
  void add_arithmetic_partials(PartialOps ops, ArgumentNames arguments);

  // Returns the rows of an operator that is correct, or not, on ranks with empty shards. Both empty the list.
  Rows allowing_empty_shards(LegalityCheck is_legal = nullptr);
  Rows refusing_empty_shards(LegalityCheck is_legal = nullptr);

 private:
  std::vector<Placement> all_inputs(const Placement& placement) const;
  std::vector<Placement> inputs_of(ArgumentNames arguments, const Placement& placement);
  std::vector<Placement> inputs_by_name(NamedPlacements named);
  void check_has(std::string_view argument) const;
  // Returns tensor_names() of the call, found once.
  const std::vector<std::string_view>& names();

  const OpCall& call_;
  std::vector<std::string_view> names_;
  std::vector<Row> rows_;
};

// Returns the names of the arguments that hold OpCall::tensors, one for each tensor.
std::vector<std::string_view> tensor_names(const OpCall& call);

// Returns the placement of each tensor of a call, whose tensor_names() are `names`.
std::vector<Placement> inputs_by_name(const std::vector<std::string_view>& names, NamedPlacements named);

// Returns the first output. Throws std::invalid_argument, naming the operator, if it is not a tensor.
const TensorMeta& first_output(const OpCall& call);
// Returns the layout of the first output. Throws std::invalid_argument, naming the operator, if it has none.
const Layout& first_output(const OpCall& call, const Composition& composition);

// Returns the number of dims of the call's first tensor.
inline int64_t num_dims(const OpCall& call) { return call.tensors.at(0).num_dims(); }

// Returns true if the call has a tensor as this argument.
bool has_tensor(const OpCall& call, std::string_view name);
// Returns the argument's value, or `otherwise` if there is no such argument or it is none.
bool flag_or(const OpCall& call, std::string_view name, bool otherwise);
// Returns the argument as a real number, or nullopt if there is no such argument or it is not a real number.
std::optional<double> real_number(const OpCall& call, std::string_view name);

// Returns the dim that an argument names, counted from 0, of the first tensor or of one with `num_dims` dims.
int64_t dim_argument(const OpCall& call, std::string_view name);
int64_t dim_argument(const OpCall& call, std::string_view name, int64_t num_dims);

}  // namespace funcol
