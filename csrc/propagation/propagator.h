// Sharding propagation: from an operator and where its tensors are, to where its results are and what has to
// move first. Needs no Python and no PyTorch; what outputs look like is asked of a function.
//
// PyTorch's counterpart: torch.distributed.tensor._sharding_prop.ShardingPropagator.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "planner/cost_model.h"
#include "propagation/compose.h"
#include "propagation/rule.h"

namespace funcol {

// A tensor of a mesh: what it looks like as a whole and how it is held. Prints as PyTorch's spec does.
struct Spec {
  TensorMeta meta;
  Layout layout;

  friend bool operator==(const Spec&, const Spec&) = default;
};

// "Spec(f32[8, 4](S(0)))".
std::string to_string(const Spec& spec);

// A call whose tensors are on one mesh.
struct OpSchema {
  OpCall call;  // its outputs are not known yet
  Mesh mesh;
  std::vector<Layout> layouts;  // of call.tensors
  std::vector<bool> stays;      // of call.tensors: written in place, so that they cannot move
  // Of the outputs, as far as they are known before: that of the tensor which the operator writes to and
  // returns. Shorter than the outputs, or empty, where nothing is known.
  std::vector<std::optional<Layout>> results;

  friend bool operator==(const OpSchema&, const OpSchema&) = default;
};

// "aten::mm(Spec(f32[8, 4](S(0)R)), Spec(f32[4, 2](RR))) on 2x4".
std::string to_string(const OpSchema& schema);

struct OutputSharding {
  std::vector<std::optional<Spec>> outputs;
  std::vector<Layout> inputs;  // what OpSchema::layouts have to become first
  std::vector<double> costs;   // of each input
  bool needs_redistribute = false;
  std::vector<IndexMask> masks;  // those that new_mask() numbers in `outputs` and `inputs`
};

// No rule is known for an operator.
class NoRuleError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What the outputs of a call look like. Throws what the operator throws for such arguments.
using OutputMetas = std::function<std::vector<std::optional<TensorMeta>>(const OpCall&)>;

// Remembers what redistributions cost, but no decisions: such a cache belongs to whoever knows what makes two
// calls alike. Safe against several threads.
class Propagator {
 public:
  // `model` prices redistribution; default_alpha_beta() of the mesh if there is none.
  explicit Propagator(OutputMetas output_metas, std::optional<CostModel> model = std::nullopt);

  // What redistributions on `mesh` cost, shared by all decisions.
  std::shared_ptr<CostSource> costs_on(const Mesh& mesh) const;
  void forget_costs() const;

  // The least-cost decision; of several at the same cost one that moves nothing, then the first one.
  // Throws NoRuleError, naming the operator, the operators with the nearest names, and what to do;
  // std::invalid_argument, naming the operator, the argument and the specs, for rows that are not as long as
  // the call's tensors, placements of dims that a tensor has not, and calls without a legal decision.
  OutputSharding propagate(const OpSchema& schema) const;
  // With rows that the caller has instead of the rule; outputs of the call are known.
  OutputSharding propagate(const OpSchema& schema, const Rows& rows) const;

  // Every legal decision with its costs, in the order of the full product of the rows, the first axis
  // slowest.
  std::vector<OutputSharding> strategies(const OpSchema& schema) const;
  std::vector<OutputSharding> strategies(const OpSchema& schema, const Rows& rows) const;

 private:
  static constexpr size_t kMostMeshes = 16;

  // The schema with its outputs, and the rows of its rule. Throws NoRuleError.
  std::pair<OpSchema, Rows> with_rule(const OpSchema& schema) const;

  OutputMetas output_metas_;
  std::optional<CostModel> model_;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<CostSource>> costs_;  // the mesh asked for last comes first
};

// Names of operators with rules that look like `op`, the likeliest first; at most five.
std::vector<std::string> similar_ops(const std::string& op);

}  // namespace funcol
