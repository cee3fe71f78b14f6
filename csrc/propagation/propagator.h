// Sharding propagation: from the layouts of an operator's inputs to the layouts of its outputs, and to the
// redistributions that the inputs need first. Needs no Python and no PyTorch; the caller passes a function
// that returns the metadata of outputs.
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
#include "propagation/composition_search.h"
#include "propagation/rule.h"

namespace funcol {

// The metadata and layout of a tensor on a mesh: PyTorch's DTensorSpec without the mesh.
struct Spec {
  TensorMeta meta;
  Layout layout;

  friend bool operator==(const Spec&, const Spec&) = default;
};

// Returns the metadata and placements: "Spec(f32[8, 4](S(0)))".
std::string to_string(const Spec& spec);

// A call on tensors of one mesh, with their layouts.
struct OpSchema {
  OpCall call;  // propagate(schema) ignores its outputs
  Mesh mesh;
  std::vector<Layout> layouts;  // of call.tensors
  std::vector<bool> is_pinned;  // of call.tensors: whether the operator writes to it, so it cannot move
  // The layouts that outputs must have: an output that the operator writes to keeps its layout. Outputs
  // beyond the end of the list may have any layout.
  std::vector<std::optional<Layout>> results;
  // The numbers of the tensors that an operator without results writes to. Rules see them as its outputs, and
  // `results` has their layouts.
  std::vector<size_t> written = {};

  friend bool operator==(const OpSchema&, const OpSchema&) = default;
};

// Makes the tensors in schema.written the outputs of the call.
void add_written_outputs(OpSchema& schema);

// Returns operator, specs and mesh: "aten::mm(Spec(f32[8, 4](S(0)R)), Spec(f32[4, 2](RR))) on 2x4".
std::string to_string(const OpSchema& schema);

struct OutputSharding {
  std::vector<std::optional<Spec>> outputs;
  std::vector<Layout> inputs;  // the layouts that inputs need before the call
  std::vector<double> costs;   // of the redistribution of each input
  bool needs_redistribute = false;
  std::vector<IndexMask> masks;  // new_mask(i) in `outputs` and `inputs` stands for masks[i]
};

// The error for an operator without a sharding rule.
class NoRuleError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A function that returns the metadata of a call's outputs. Throws what the operator throws for its
// arguments.
using OutputMetas = std::function<std::vector<std::optional<TensorMeta>>(const OpCall&)>;

// Decides shardings. Keeps redistribution costs between calls, but no decisions: the caller caches these.
// Thread-safe.
class Propagator {
 public:
  // Prices redistributions with `model`, by default with default_alpha_beta() of the mesh.
  explicit Propagator(OutputMetas output_metas, std::optional<CostModel> model = std::nullopt);

  // Returns the redistribution costs on `mesh`, which all decisions share.
  std::shared_ptr<SearchPool> costs_on(const Mesh& mesh) const;
  void forget_costs() const;

  // Returns the least-cost decision. Of equals, a decision that moves no input wins, then the first one.
  // Throws NoRuleError, with the operators of the nearest names, if the operator has no rule. Throws
  // std::invalid_argument, with operator, argument and specs, if a row does not match the number of tensors,
  // a placement shards a dim that its tensor does not have, or no decision is legal.
  OutputSharding propagate(const OpSchema& schema) const;
  // Returns the same with the caller's rows in place of a rule. schema.call.outputs must be filled in.
  OutputSharding propagate(const OpSchema& schema, const Rows& rows) const;

  // Returns true if `sharding` is a legal decision, in any shard order, with which the operator computes
  // correct numbers.
  bool allows(const OpSchema& schema, const Rows& rows, const OutputSharding& sharding) const;

  // Returns every legal decision with its costs, in the order of the full product of the rows: the last axis
  // varies fastest.
  std::vector<OutputSharding> strategies(const OpSchema& schema) const;
  std::vector<OutputSharding> strategies(const OpSchema& schema, const Rows& rows) const;

 private:
  static constexpr size_t kMostMeshes = 16;

  // Returns the schema with its outputs, and the rows of its rule. Throws NoRuleError.
  std::pair<OpSchema, Rows> with_rule(const OpSchema& schema) const;

  OutputMetas output_metas_;
  std::optional<CostModel> model_;
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<SearchPool>> costs_;  // most recently used first
};

// Returns at most five operators with rules whose names are nearest to `op`, nearest first.
std::vector<std::string> similar_ops(const std::string& op);

}  // namespace funcol
