// What it costs to get from one layout of a tensor to any other: one search for all targets, taken up again
// where it stopped.
//
// Worked case, f32[8, 8] on {dp: 2, tp: 4}, source "S0,R", step counts: S(0)R 0, S(0)S(0), S(0)S(1) 0
// (split), S(1)R 1 (all_to_all), RR 2 (all_gather), ...
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "layout/layout.h"
#include "layout/tensor_meta.h"
#include "planner/cost_model.h"
#include "planner/state.h"
#include "planner/state_table.h"

namespace funcol {

// State: the planner's, and the same steps lead from one to the next (search.h), with three restrictions:
//   - a partial or a strided shard that was made for a target stays: plan_redistribution may leave it again;
//   - an exchange over several merged axes leads from the source to the target at once, and is over at most
//     three axes that hold several ranks: plan_redistribution may take other steps before and after it;
//   - four or more merged axes cut a dim together in the order of the mesh alone.
// So a cost is never below that of plan_redistribution, and equal to it unless its plan does what is in
// brackets. Invariant: layouts are settled in the order of their costs, each by a least path within these
// restrictions.
//
// Under a model that prices whole redistributions (Costs::rings()) there is no search: all layouts of the
// default shard order are priced at once, and others cannot be reached; a source of another order is searched
// from, as are more layouts than kMostPriced.
//
// Not safe against several threads at once.
class Reach {
 public:
  // A layout that holds no mask, as Space::state() writes it, and its cost.
  struct Settled {
    State state;
    double cost;
  };

  // Targets have placements of `source` and of `vocabulary`. `mesh` and `costs` outlive this. Throws
  // std::invalid_argument for more than 8 axes of several ranks or 16 dims.
  Reach(const Mesh& mesh, const Costs& costs, std::vector<int64_t> shape, int64_t itemsize, Layout source,
        std::vector<Placement> vocabulary);
  Reach(const Reach&) = delete;
  Reach& operator=(const Reach&) = delete;
  Reach(Reach&&) = delete;
  Reach& operator=(Reach&&) = delete;
  ~Reach() = default;

  // The least cost; infinity if there is no way: to placements outside of the vocabulary, and to a mask that
  // the source has unless all of the layout is that of the source.
  double to(const Layout& target);
  // The same if it is known by now, else a bound: nothing that is not known costs less.
  double at_least(const Layout& target) const;

  // The `n`-th nearest layout, nullptr if there are not so many; good until the next call.
  const Settled* nearest(size_t n);
  // What the `n`-th nearest layout costs at least; infinity if it is known that there are not so many.
  double at_least(size_t n) const;

  // What it costs to make a mask (R -> MaskP on an axis) on the tensor under this layout.
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
    double cost = std::numeric_limits<double>::infinity();  // by the paths seen so far
    double known = kUnknown;                                // of a state without what is final: the least
    bool closed = false;
  };
  struct Entry {
    double cost;
    int node;
    bool ends;  // no step leads on

    bool operator<(const Entry& other) const {
      return cost != other.cost ? cost > other.cost : node > other.node;
    }
  };

  // The placements that each axis may have, if all their layouts are to be priced at once; else empty.
  std::vector<std::vector<Placement>> placements_to_price() const;
  void price_all(const std::vector<std::vector<Placement>>& of_axis);
  // Whether a path may lead there, masks to be made at its end.
  bool may_reach(const Layout& target) const;
  double cost_of_masks(const Layout& target) const;
  // Settles the next layout; false if there are no more.
  bool settle();
  void expand_last();
  void open(int node, double cost, bool ends);
  int node_of(const State& state);
  double radius() const;

  const std::vector<int64_t> shape_;
  const int64_t itemsize_;
  const Layout source_;
  const std::vector<Placement> vocabulary_;
  const Space space_;
  const Costs& costs_;
  StateTable states_;
  std::vector<Node> nodes_;  // by the states' numbers
  std::vector<Entry> queue_;
  std::vector<Settled> settled_;
  int last_ = -1;  // the node that was settled last, if its steps are still to be taken
};

// Costs of all redistributions from one of `sources` to one of `targets`, row by row: [source][target].
std::vector<double> redistribution_costs(const std::vector<Layout>& sources,
                                         const std::vector<Layout>& targets, const TensorMeta& meta,
                                         const Mesh& mesh, const CostModel& model);

}  // namespace funcol
