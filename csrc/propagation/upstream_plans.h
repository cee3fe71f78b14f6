// The costs of PyTorch's plans that its greedy planner cannot make: from tensors with a shard order other
// than the default one, and from or to strided shards that do not mean a shard order.
//
// PyTorch's counterpart: DTensorRedistributePlanner.generate_graph_based_transform_infos.
#pragma once

#include <array>
#include <cstdint>
#include <queue>
#include <unordered_map>
#include <vector>

#include "layout/layout.h"
#include "layout/tensor_meta.h"
#include "planner/dtensor_costs.h"

namespace funcol {

// Dijkstra's algorithm from one layout over PyTorch's single steps, in PyTorch's order, so that of equal
// paths it finds PyTorch's. The search adds up step costs for the parts that ranks really hold; the price of
// a path adds up step costs for the sizes that PyTorch assumes, in which strided shards do not count.
class UpstreamPlans {
 public:
  static constexpr size_t kMostAxes = 8;

  // Starts at `source`. `targets` are all placements that targets may have. `rings` must outlive this and has
  // at most kMostAxes axes.
  UpstreamPlans(const TensorMeta& meta, const Layout& source, std::vector<Placement> targets,
                const std::vector<RingAxis>& rings);

  // Returns the price of the path to `target` in the default shard order, or kImpossible for partials that
  // are made of shards or of other partials. Extends the search until it finds the path.
  double cost_to(const std::vector<Placement>& target);

 private:
  // Numbers in placements_, and for each axis how many axes cut its dim before it.
  struct State {
    std::array<uint8_t, kMostAxes> place{};
    std::array<uint8_t, kMostAxes> position{};

    friend bool operator==(const State&, const State&) = default;
  };
  struct StateHash {
    size_t operator()(const State& state) const;
  };
  struct Entry {
    double cost;       // of the search
    uint64_t counter;  // of equal costs, the first that was found comes first
    State state;
    double price;
    double gb;

    friend bool operator<(const Entry& a, const Entry& b) {
      return a.cost != b.cost ? a.cost > b.cost : a.counter > b.counter;
    }
  };

  const Placement& at(const State& state, size_t axis) const { return placements_[state.place.at(axis)]; }
  State state_of(const std::vector<Placement>& placements, const ShardOrder& order) const;
  uint8_t number_of(const Placement& placement) const;
  // Returns the number of axes that cut `dim`, and the last of them.
  std::pair<uint8_t, size_t> cuts(const State& state, int64_t dim) const;
  State moved(State state, size_t axis, size_t place) const;
  bool may_be_partial(const State& state, size_t axis, const Placement& placement) const;
  double gb_of(const State& state) const;
  void add(const Entry& from, size_t axis, size_t place);
  void expand(const Entry& from);
  void expand_shards(const Entry& from, bool are_strided);
  // Settles the next state. Returns false if there are no more.
  bool settle();

  const int64_t num_dims_;
  const double bytes_;
  const std::vector<RingAxis>& rings_;
  // Replicate, Shard(0), Shard(1), ..., then the other placements of source and targets.
  std::vector<Placement> placements_;
  std::priority_queue<Entry> queue_;
  std::unordered_map<State, double, StateHash> prices_;  // of settled states
  uint64_t counter_ = 0;
};

}  // namespace funcol
