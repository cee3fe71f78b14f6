// What an operator may do on local tensors, one mesh axis at a time.
//
// A row says: with these placements of the inputs on an axis, the operator run on what each rank holds gives
// the outputs with those placements. Worked case, mm of [m, k] and [k, n]:
//   R <- R, R     S(0) <- S(0), R     S(1) <- R, S(1)     P <- S(1), S(0)     P <- P, R     P <- R, P
// Rows of different axes combine freely, as far as Rule::is_legal lets them. A row of Replicates alone need
// not be listed: it is always there, and comes first.
//
// PyTorch's counterpart: torch.distributed.tensor._ops.single_dim_strategy.
#pragma once

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

// In a row, Placement::shard(dim, kAnySplit) stands for S(dim) and for every strided shard of dim: all such
// entries of one row are cut alike, plainly or with the same split factor.
constexpr int64_t kAnySplit = 0;
inline Placement any_shard(int64_t dim) { return Placement::shard(dim, kAnySplit); }

// Of indices into dim `dim` of a tensor of this shape: which of them are outside of what a rank holds when
// Shard(dim) cuts the tensor. Those are set to 0, and what they made is set to 0 before it is added up.
struct IndexMask {
  std::vector<int64_t> shape;
  int64_t dim = 0;

  friend bool operator==(const IndexMask&, const IndexMask&) = default;
};

// The Placement::mask by which a row speaks of the `number`-th of Rows::masks: a new one for every decision,
// and one and the same in all of its inputs and outputs. Odd, so that no address of a mask is the same.
constexpr uint64_t new_mask(size_t number) { return 2 * number + 1; }

// A row's outputs are as many as OpCall::outputs, nothing where that has nothing; its inputs as many as
// OpCall::tensors.
struct Row {
  std::vector<std::optional<Placement>> outputs;
  std::vector<Placement> inputs;

  friend bool operator==(const Row&, const Row&) = default;
};

// Rows of all axes put together: a layout for each tensor.
struct Composition {
  std::vector<std::optional<Layout>> outputs;
  std::vector<Layout> inputs;

  friend bool operator==(const Composition&, const Composition&) = default;
};

struct Rows {
  std::vector<Row> rows;

  // Whether the operator is right, too, on ranks that hold nothing of a sharded dim. If not, a composition
  // must leave every rank something.
  bool allows_empty_shards = false;

  // What no axis knows alone, as whether sizes divide; nothing where all compositions are legal.
  std::function<bool(const OpCall&, const Composition&, const Mesh&)> is_legal;

  std::vector<IndexMask> masks = {};  // that rows make
};

// The rows of a call; they depend on its arguments and on what its tensors look like, not on where they are.
// Throws std::invalid_argument for arguments that the operator cannot have.
using Rule = std::function<Rows(const OpCall&)>;

// The rule of an operator of PyTorch, nullptr if there is none in C++. The name is OpCall::op. In-place and
// out= operators have the rule of what they return: that the tensor written to cannot move is not their part.
const Rule* find_rule(std::string_view op);

// Whether the operator does the same to every element of its lists of tensors (_foreach_add, _fused_adamw_).
// Its rule is called for an element: an OpCall whose arguments are those of the operator, with a tensor where
// it has a list, and whose outputs are what it returns, or writes, for the element.
bool is_per_element(std::string_view op);

// The operators that find_rule() knows, sorted. A name without an overload stands for all of the operator's,
// for its in-place and out= forms, and for _foreach_ of it: "aten::add" for "aten::add_.Tensor".
std::vector<std::string> ops_with_rules();

// Which arguments tell sizes of the whole tensors, and have to tell those of the local ones when the operator
// is called on these.
struct LocalSizeArgs {
  std::string_view shape;   // the argument that is output 0's shape, view(size); empty if there is none
  std::string_view stride;  // the one that is its stride, new_empty_strided(stride)

  // N, C and HxW: input 0's dims 0 and 1, and the product of the others (group_norm).
  bool batch_channels_pixels = false;
  // Dims are dropped because they are 1 long as a whole: the local call is squeeze.dims (squeeze_.dims) of
  // those that have no place in the output.
  bool squeezed_dims = false;

  friend bool operator==(const LocalSizeArgs&, const LocalSizeArgs&) = default;
};

// Nothing for operators whose arguments stay as they are.
std::optional<LocalSizeArgs> local_size_args(std::string_view op);

}  // namespace funcol
