#include "planner/search.h"

#include <algorithm>
#include <limits>
#include <queue>
#include <stdexcept>
#include <unordered_map>

#include "planner/estimate.h"
#include "planner/masks.h"
#include "planner/steps.h"

namespace funcol {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

class Search {
 public:
  // `begins` if no mask is applied before: the first step then reads the caller's tensor itself.
  Search(const Space& space, const Costs& costs, bool begins, int64_t max_bytes)
      : space_(space),
        costs_(costs),
        estimate_(space, costs),
        begins_(begins),
        max_bytes_(max_bytes),
        src_(space.held(space.src())) {}

  // The moves of a least path; false if no path stays within the bound.
  bool run(std::vector<Move>& path) {
    open({space_.src(), src_, {}}, -1, 0, 0);
    std::vector<Move> moves;
    while (!queue_.empty()) {
      const Entry entry = queue_.top();
      queue_.pop();
      const Node node = nodes_[entry.node];
      if (best_[node.state] != entry.node) {
        continue;  // reached more cheaply since
      }
      if (node.state == space_.dst()) {
        trace(entry.node, path);
        return true;
      }
      moves.clear();
      space_.expand(node.state, moves);
      for (const auto& move : moves) {
        if (max_bytes_ == kNoLimit ||
            peak_bytes(move.size, begins_ && node.parent < 0, src_.bytes) <= max_bytes_) {
          open(move, entry.node, node.cost + costs_.of(move.size), node.num_steps + 1);
        }
      }
    }
    return false;
  }

  // The least bound under which dst can be reached.
  int64_t least_bytes() {
    std::unordered_map<State, int64_t, StateHash> least;
    using Reached = std::tuple<int64_t, int64_t, State>;  // bound, when it was found
    const auto later = [](const Reached& a, const Reached& b) {
      return std::tie(std::get<0>(a), std::get<1>(a)) > std::tie(std::get<0>(b), std::get<1>(b));
    };
    std::priority_queue<Reached, std::vector<Reached>, decltype(later)> queue(later);
    int64_t found = 0;
    queue.emplace(src_.bytes, found, space_.src());
    least[space_.src()] = src_.bytes;
    std::vector<Move> moves;
    while (!queue.empty()) {
      const auto [bound, when, state] = queue.top();
      queue.pop();
      if (state == space_.dst()) {
        return bound;
      }
      if (bound > least[state]) {
        continue;
      }
      moves.clear();
      space_.expand(state, moves);
      for (const auto& move : moves) {
        const int64_t next =
            std::max(bound, peak_bytes(move.size, begins_ && state == space_.src(), src_.bytes));
        const auto [known, is_new] = least.try_emplace(move.next, next);
        if (is_new || next < known->second) {
          known->second = next;
          queue.emplace(next, ++found, move.next);
        }
      }
    }
    throw std::logic_error("plan_redistribution: no path to the target layout");
  }

 private:
  struct Node {
    State state;
    StepSize size;  // of the step that led here
    int parent;
    double cost;
    int num_steps;
  };
  struct Entry {
    double total;  // cost so far + estimate
    double rest;   // the estimate alone: of equals, the nearest to the target first
    int num_steps;
    int node;

    bool operator<(const Entry& other) const {
      return std::tie(total, num_steps, rest, node) >
             std::tie(other.total, other.num_steps, other.rest, other.node);
    }
  };

  void open(const Move& move, int parent, double cost, int num_steps) {
    const int node = static_cast<int>(nodes_.size());
    const auto [known, is_new] = best_.try_emplace(move.next, node);
    if (!is_new) {
      const Node& other = nodes_[known->second];
      if (std::tie(other.cost, other.num_steps) <= std::tie(cost, num_steps)) {
        return;
      }
      known->second = node;
    }
    nodes_.push_back({move.next, move.size, parent, cost, num_steps});
    const double rest = estimate_.of(move.next, move.held);
    queue_.push({cost + rest, rest, num_steps, node});
  }

  void trace(int node, std::vector<Move>& path) const {
    for (; nodes_[node].parent >= 0; node = nodes_[node].parent) {
      path.push_back({nodes_[node].state, {}, nodes_[node].size});
    }
    std::ranges::reverse(path);
  }

  const Space& space_;
  const Costs& costs_;
  const Estimate estimate_;
  const bool begins_;
  const int64_t max_bytes_;
  const Held src_;
  std::vector<Node> nodes_;
  std::unordered_map<State, int, StateHash> best_;
  std::priority_queue<Entry> queue_;
};

}  // namespace

Plan plan_redistribution(const Redistribution& task, const CostModel& model,
                         std::optional<int64_t> max_bytes) {
  const Masks masks(task);
  const Space space(masks.unmasked());
  const Costs costs(model, task.mesh);
  const bool begins = masks.applied_axes().empty();
  const int64_t mask_bytes = peak_bytes(masks, space);
  const int64_t bound = max_bytes.value_or(kNoLimit);
  std::vector<Move> path;
  if (mask_bytes > bound || !Search(space, costs, begins, bound).run(path)) {
    const int64_t least = std::max(mask_bytes, Search(space, costs, begins, kNoLimit).least_bytes());
    throw std::invalid_argument("plan_redistribution: no way from " + to_string(task.src) + " to " +
                                to_string(task.dst) + " holds at most " + std::to_string(bound) +
                                " bytes. The least that would do is max_bytes=" + std::to_string(least) +
                                ".");
  }
  Steps steps(task, masks, space, costs);
  for (const auto& move : path) {
    steps.add(move);
  }
  return steps.finish();
}

}  // namespace funcol
