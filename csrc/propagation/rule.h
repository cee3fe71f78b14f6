// Sharding rules: for each operator, the placements under which it can run on local tensors.
//
// A row is for one mesh axis. It says: if the inputs have these placements, running the operator on each
// rank's local tensors gives outputs with those placements. Worked case, mm of [m, k] and [k, n]:
//   R <- R, R     S(0) <- S(0), R     S(1) <- R, S(1)     P <- S(1), S(0)     P <- P, R     P <- R, P
// Rows of different axes combine freely unless Rows::is_legal forbids it. A row of Replicates alone always
// exists and comes first; rules do not list it.
//
// PyTorch's counterpart: torch.distributed.tensor._ops.single_dim_strategy.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "layout/layout.h"
#include "layout/mesh.h"
#include "propagation/op_call.h"

namespace funcol {

// In a row, Placement::shard(dim, kAnySplit) stands for S(dim) and for every strided shard of dim. All such
// entries of one row have the same split factor.
constexpr int64_t kAnySplit = 0;
inline Placement any_shard(int64_t dim) { return Placement::shard(dim, kAnySplit); }
inline bool is_any_shard(const Placement& placement) {
  return placement.is_shard() && placement.split_factor == kAnySplit;
}

// A mask of indices into dim `dim` of a tensor of this shape, which Shard(dim) cuts. It marks the indices
// outside of a rank's shard. These are set to 0 for the lookup, and their results are set to 0 before they
// are summed.
struct IndexMask {
  std::vector<int64_t> shape;
  int64_t dim = 0;

  friend bool operator==(const IndexMask&, const IndexMask&) = default;
};

// Returns the Placement::mask of Rows::masks[number] in a row. Every decision makes a new mask, which inputs
// and outputs share. The id is odd, so it differs from the address of any mask.
constexpr uint64_t new_mask(size_t number) { return 2 * number + 1; }

// In a row, any_mask() stands for every masked partial that a tensor of the call has. All such entries of a
// row are the same masked partial.
constexpr uint64_t kAnyMask = 2;  // the address of no mask
inline Placement any_mask() { return Placement::partial(PartialOp::kSum, kAnyMask); }
inline bool is_any_mask(const Placement& placement) { return placement.mask == kAnyMask; }

// A placement for each of OpCall::outputs (nullopt for one that is not a tensor) and of OpCall::tensors.
struct Row {
  std::vector<std::optional<Placement>> outputs;
  std::vector<Placement> inputs;

  friend bool operator==(const Row&, const Row&) = default;
};

// Returns true if is_true(placement) holds for an input or an output of the row.
template <typename IsTrue>
bool any_placement(const Row& row, const IsTrue& is_true) {
  return std::ranges::any_of(row.inputs, is_true) ||
         std::ranges::any_of(row.outputs, [&](const auto& output) { return output && is_true(*output); });
}

inline bool has_partials(const Row& row) {
  return any_placement(row, [](const Placement& placement) { return placement.is_partial(); });
}

// Returns true if is_true(a's placement, b's placement) holds for every tensor; both rows are of one call.
template <typename IsTrue>
bool all_placements(const Row& a, const Row& b, const IsTrue& is_true) {
  return std::ranges::equal(a.inputs, b.inputs, is_true) &&
         std::ranges::equal(a.outputs, b.outputs, [&](const auto& output, const auto& other) {
           return !output || !other || is_true(*output, *other);
         });
}

// Returns the row with every split factor that any_shard() left open set to `split_factor`.
Row with_split_factor(Row row, int64_t split_factor);
// Returns the row with `masked`, a masked partial, for every any_mask().
Row with_mask(Row row, const Placement& masked);

// One row for each mesh axis, as a layout for each tensor.
struct Composition {
  std::vector<std::optional<Layout>> outputs;
  std::vector<Layout> inputs;

  friend bool operator==(const Composition&, const Composition&) = default;
};

struct Rows {
  std::vector<Row> rows;

  // True if the operator is also correct on ranks with empty shards. If false, a composition must leave no
  // rank without indices of a sharded dim.
  bool allows_empty_shards = false;

  // Checks what one axis cannot decide, such as whether sizes divide. Null if all compositions are legal.
  std::function<bool(const OpCall&, const Composition&, const Mesh&)> is_legal = nullptr;

  std::vector<IndexMask> masks = {};  // the masks that rows make
};

// A function that returns the rows of a call, from its arguments and the metadata of its tensors, but not
// from layouts. Throws std::invalid_argument for arguments that the operator does not accept.
using Rule = std::function<Rows(const OpCall&)>;

// Returns the rule of the PyTorch operator with this OpCall::op, or nullptr. In-place and out= operators have
// the rule of their functional form; the engine keeps the tensor that they write to in place.
const Rule* find_rule(std::string_view op);

// Returns true if the operator treats all elements of its tensor lists equally (_foreach_add, _fused_adamw_).
// Its rule takes an OpCall for one element: a tensor in place of each list, and the outputs of that element.
bool is_per_element(std::string_view op);

// Returns the names that find_rule() knows, sorted. A name without an overload covers all overloads, in-place
// and out= forms and the _foreach_ form: "aten::add" for "aten::add_.Tensor".
std::vector<std::string> ops_with_rules();

// The arguments with sizes of full tensors, which have to be replaced by local sizes for the local call.
struct LocalSizeArgs {
  std::string_view shape;   // the argument with the shape of output 0, such as view(size); empty if none
  std::string_view stride;  // the argument with its strides, such as new_empty_strided(stride); empty if none

  // True if the arguments N, C and HxW are input 0's dims 0 and 1 and the product of the others (group_norm).
  bool batch_channels_pixels = false;
  // True if dims are dropped because the full tensor has size 1 there. The local call is then squeeze.dims
  // (squeeze_.dims) with the dims that the output lacks.
  bool squeezed_dims = false;

  friend bool operator==(const LocalSizeArgs&, const LocalSizeArgs&) = default;
};

// Returns the arguments of `op` with sizes of full tensors, or nullopt for operators without such arguments.
std::optional<LocalSizeArgs> local_size_args(std::string_view op);

}  // namespace funcol
