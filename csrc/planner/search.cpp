#include "planner/search.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <tuple>

#include "planner/estimate.h"
#include "planner/masks.h"
#include "planner/state_table.h"
#include "planner/steps.h"

namespace funcol {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// The A* search for a path of steps from src to dst: a least-cost one, or of bounded cost after kMostExact
// states.
class PlanSearch {
 public:
  // Prepares a search. `begins` means no mask is applied first: the first step reads the caller's tensor.
  PlanSearch(const Space& space, const Costs& costs, bool begins, int64_t max_bytes)
      : space_(space),
        costs_(costs),
        estimate_(space, costs),
        begins_(begins),
        max_bytes_(max_bytes),
        src_(space.largest_shard(space.src())) {}

  // Fills `path` with the moves of a least-cost path. Returns false if no path stays within `max_bytes`.
  bool run(std::vector<Move>& path) {
    nodes_.reserve(kFirstNodes);
    open({space_.src(), src_, {}}, -1, 0, 0);
    int num_expanded = 0;
    while (!queue_.empty()) {
      const Entry entry = queue_.front();
      std::ranges::pop_heap(queue_, std::less<>());
      queue_.pop_back();
      const Node node = nodes_[entry.node];
      if (best_[node.state] != entry.node) {
        continue;  // a cheaper path was found since
      }
      const State state = states_[node.state];
      if (state == space_.dst()) {
        trace(entry.node, path);
        return true;
      }
      expand(entry.node, state);
      if (++num_expanded == kMostExact) {
        accept_slack();
      }
    }
    return false;
  }

  // Returns the least `max_bytes` for which a path to dst exists.
  int64_t least_bytes() {
    std::vector<int64_t> least{src_.bytes};  // by the states' numbers
    states_.insert(space_.src());
    using Reached = std::tuple<int64_t, int64_t, int>;  // {peak bytes of the path, order of discovery, state}
    const auto later = [](const Reached& a, const Reached& b) {
      return std::tie(std::get<0>(a), std::get<1>(a)) > std::tie(std::get<0>(b), std::get<1>(b));
    };
    std::priority_queue<Reached, std::vector<Reached>, decltype(later)> queue(later);
    int64_t num_found = 0;
    queue.emplace(src_.bytes, num_found, 0);
    while (!queue.empty()) {
      const auto [bytes, when, number] = queue.top();
      const int64_t bound = bytes;
      queue.pop();
      const State state = states_[number];
      if (state == space_.dst()) {
        return bound;
      }
      if (bound > least[number]) {
        continue;
      }
      const LargestShard shard = space_.largest_shard(state);
      space_.expand(state, shard, [&](StepKind kind, const Space::SlotGroup& group, const State& next_state) {
        // A path never holds less than its beginning, so a step to a state reached within `bound` need not be
        // sized.
        if (const int number = states_.find(next_state); number >= 0 && least[number] <= bound) {
          return;
        }
        const auto size = space_.move(kind, group, state, shard, next_state).size;
        const int64_t next =
            std::max<int64_t>(bound, peak_bytes(size, begins_ && state == space_.src(), src_.bytes));
        const auto [known, is_new] = states_.insert(next_state);
        if (is_new) {
          least.push_back(next);
        }
        if (is_new || next < least[known]) {
          least[known] = next;
          queue.emplace(next, ++num_found, known);
        }
      });
    }
    throw std::logic_error("plan_redistribution: no path to the target layout");
  }

 private:
  static constexpr size_t kFirstNodes = 64;

  struct Node {
    int state;      // its number in states_
    StepSize size;  // of the step that led here
    int parent;
    double cost;
    int num_steps;
  };
  struct Entry {
    double total;  // cost so far + estimate, times slack_
    double rest;   // the estimate alone: of equal totals, the state nearest to dst comes first
    int num_steps;
    int node;

    bool operator<(const Entry& other) const {
      return std::tie(total, num_steps, rest, node) >
             std::tie(other.total, other.num_steps, other.rest, other.node);
    }
  };

  // Weighs the estimate more, so that the search follows the cheapest paths it has instead of comparing all.
  // A least-cost path always has a node in the queue, whose total is at most kSlack times the path's cost.
  void accept_slack() {
    slack_ = kSlack;
    for (auto& entry : queue_) {
      entry.total += (kSlack - 1) * entry.rest;
    }
    std::ranges::make_heap(queue_, std::less<>());
  }

  void expand(int from, const State& state) {
    const Node node = nodes_[from];
    const LargestShard shard = space_.largest_shard(state);
    space_.expand(state, shard, [&](StepKind kind, const Space::SlotGroup& group, const State& next) {
      // No step has a negative cost, so a step back to a known state need not be priced.
      if (is_known(next, node.cost, node.num_steps + 1)) {
        return;
      }
      const Move move = space_.move(kind, group, state, shard, next);
      if (max_bytes_ == kNoLimit ||
          peak_bytes(move.size, begins_ && node.parent < 0, src_.bytes) <= max_bytes_) {
        open(move, from, node.cost + costs_.of(move.size), node.num_steps + 1);
      }
    });
  }

  // Returns true if a path to `state` is known that costs no more and has no more steps.
  bool is_known(const State& state, double cost, int num_steps) const {
    const int number = states_.find(state);
    if (number < 0) {
      return false;
    }
    const Node& known = nodes_[best_[number]];
    return std::tie(known.cost, known.num_steps) <= std::tie(cost, num_steps);
  }

  void open(const Move& move, int parent, double cost, int num_steps) {
    if (is_known(move.next, cost, num_steps)) {
      return;
    }
    const int node = static_cast<int>(nodes_.size());
    const auto [state, is_new] = states_.insert(move.next);
    if (is_new) {
      best_.push_back(node);
    }
    best_[state] = node;
    nodes_.push_back({state, move.size, parent, cost, num_steps});
    const double rest = estimate_.of(move.next, move.shard);
    queue_.push_back({cost + slack_ * rest, rest, num_steps, node});
    std::ranges::push_heap(queue_, std::less<>());
  }

  void trace(int node, std::vector<Move>& path) const {
    for (; nodes_[node].parent >= 0; node = nodes_[node].parent) {
      path.push_back({states_[nodes_[node].state], {}, nodes_[node].size});
    }
    std::ranges::reverse(path);
  }

  const Space& space_;
  const Costs& costs_;
  const Estimate estimate_;
  const bool begins_;
  const int64_t max_bytes_;
  const LargestShard src_;
  StateTable states_;
  std::vector<int> best_;  // state -> node of its cheapest known path
  std::vector<Node> nodes_;
  std::vector<Entry> queue_;  // a heap
  double slack_ = 1;
};

}  // namespace

BeyondMemory::BeyondMemory(const Redistribution& task, int64_t max_bytes, int64_t least_bytes)
    : std::invalid_argument("plan_redistribution: no way from " + to_string(task.src) + " to " +
                            to_string(task.dst) + " holds at most " + std::to_string(max_bytes) +
                            " bytes. The least that would do is max_bytes=" + std::to_string(least_bytes) +
                            "."),
      least_bytes_(least_bytes) {}

Plan plan_redistribution(const Redistribution& task, const CostModel& model,
                         std::optional<int64_t> max_bytes) {
  const Masks masks(task);
  const Space space(masks.unmasked());
  const Costs costs(model, task.mesh);
  const bool begins = masks.applied_axes().empty();
  const int64_t mask_bytes = peak_bytes(masks, space);
  const int64_t bound = max_bytes.value_or(kNoLimit);
  std::vector<Move> path;
  if (mask_bytes > bound || !PlanSearch(space, costs, begins, bound).run(path)) {
    const int64_t least = std::max(mask_bytes, PlanSearch(space, costs, begins, kNoLimit).least_bytes());
    throw BeyondMemory(task, bound, least);
  }
  Steps steps(task, masks, space, costs);
  for (const auto& move : path) {
    steps.add(move);
  }
  return steps.finish();
}

}  // namespace funcol
