// The costs of redistributions from one layout to any other, by one resumable search (single-source shortest
// paths).
//
// Worked case, f32[8, 8] on {dp: 2, tp: 4}, source "S0,R", step counts: S(0)R 0, S(0)S(0), S(0)S(1) 0
// (split), S(1)R 1 (all_to_all), RR 2 (all_gather), ...
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "layout/layout.h"
#include "layout/tensor_meta.h"
#include "planner/cost_model.h"
#include "planner/state.h"
#include "planner/state_table.h"

namespace funcol {

// Dijkstra's algorithm over the states and steps of plan_redistribution (search.h), with three restrictions:
//
// - A partial or strided shard that was made for a target is kept.
// - An exchange over several merged axes is the only step of its path, and has at most three axes of several
//   ranks.
// - Four or more merged axes cut a dim together only in mesh order.
// A cost is therefore never below the cost of plan_redistribution, and equal to it unless the plan breaks one
// of these restrictions. Invariant: layouts are settled in the order of their costs, each by a least-cost
// path within the restrictions.
//
// Under DTensorCosts (Costs::rings()) there is no search: all layouts of the default shard order are priced
// at once by dtensor_cost(), and layouts of other orders have no path. The search runs only if the source has
// another shard order, or if there are more than kMostPriced layouts.
//
// Not thread-safe.
class ShortestPaths {
 public:
  // A layout without masks, as Space::state() writes it, and its cost.
  struct Settled {
    State state;
    double cost;
  };

  // Prepares the paths to targets with the placements of `source` and `vocabulary`, and Replicate. `mesh` and
  // `costs` must outlive this. Throws std::invalid_argument for more than 8 axes of several ranks or 16 dims.
  ShortestPaths(const Mesh& mesh, const Costs& costs, std::vector<int64_t> shape, int64_t itemsize,
                Layout source, std::vector<Placement> vocabulary);
  ShortestPaths(const ShortestPaths&) = delete;
  ShortestPaths& operator=(const ShortestPaths&) = delete;
  ShortestPaths(ShortestPaths&&) = delete;
  ShortestPaths& operator=(ShortestPaths&&) = delete;
  ~ShortestPaths() = default;

  // Returns the least cost of a path to `target`. Returns kImpossible for placements outside of the
  // vocabulary, and for a mask of the source in any layout but the source itself.
  double cost_to(const Layout& target);

  // Returns the `n`-th cheapest layout, valid until the next call, or nullptr if there are fewer.
  const Settled* nearest(size_t n);
  // Returns a lower bound of the cost of the `n`-th cheapest layout; kImpossible if the search ended with
  // fewer.
  double at_least(size_t n) const;

  // Returns the cost of making a mask (R -> MaskP on an axis) under this layout.
  double mask_cost(const State& layout) const;

  const Space& space() const { return space_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t itemsize() const { return itemsize_; }
  const Layout& source() const { return source_; }
  const std::vector<Placement>& vocabulary() const { return vocabulary_; }

 private:
  static constexpr double kUnknown = -1;
  static constexpr size_t kMostPriced = 4096;

  struct Node {
    double cost = kImpossible;  // of the cheapest path found so far
    double known = kUnknown;    // the least cost, kept at the state without final placements
    bool closed = false;
  };
  struct Entry {
    double cost;
    int node;
    bool ends;  // the path ends with an exchange, so no step follows

    bool operator<(const Entry& other) const {
      return cost != other.cost ? cost > other.cost : node > other.node;
    }
  };

  // Returns the placements of each axis if all their layouts are to be priced at once, else an empty list.
  std::vector<std::vector<Placement>> placements_to_price() const;
  void price_all(const std::vector<std::vector<Placement>>& of_axis);
  // Returns true if a path may lead to `target`, with masks made at its end.
  bool may_lead_to(const Layout& target) const;
  double cost_of_masks(const Layout& target) const;
  // Settles the next layout. Returns false if there are no more.
  bool settle();
  void expand_last();
  void open(int node, double cost, bool ends);
  int node_of(const State& state);
  // Returns a lower bound of the cost of every layout that is not settled yet.
  double frontier() const;

  const std::vector<int64_t> shape_;
  const int64_t itemsize_;
  const Layout source_;
  const std::vector<Placement> vocabulary_;
  const Space space_;
  const Costs& costs_;
  StateTable states_;
  std::vector<Node> nodes_;  // by number in states_
  std::vector<Entry> queue_;
  std::vector<Settled> settled_;
  int last_ = -1;  // the node that was settled last, until its steps are expanded
};

// Returns the costs of redistributions from `sources` to `targets`, as a row-major table [source][target].
std::vector<double> redistribution_costs(const std::vector<Layout>& sources,
                                         const std::vector<Layout>& targets, const TensorMeta& meta,
                                         const Mesh& mesh, const CostModel& model);

}  // namespace funcol
