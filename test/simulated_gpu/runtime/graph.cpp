#include "graph.h"

#include <set>

namespace simulated_gpu {
namespace {

// One replay while it runs.
class Replay {
 public:
  explicit Replay(std::shared_ptr<const Nodes> nodes)
      : nodes_(std::move(nodes)), num_missing_(nodes_->size()), followers_(nodes_->size()) {
    for (size_t node = 0; node < nodes_->size(); ++node) {
      const auto& after = (*nodes_)[node].after;
      num_missing_[node] = after.size();
      for (const size_t before : after) {
        followers_[before].push_back(node);
      }
      if (after.empty()) {
        ready_.push_back(node);
      }
    }
  }

  // Runs a part of one node. True once all are finished.
  bool step() {
    if (ready_.empty()) {
      return true;
    }
    const size_t at = random() % ready_.size();
    const size_t node = ready_[at];
    if (advance(node)) {
      ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(at));
      for (const size_t follower : followers_[node]) {
        if (--num_missing_[follower] == 0) {
          ready_.push_back(follower);
        }
      }
    }
    return ready_.empty();
  }

 private:
  // True if the node is finished.
  bool advance(size_t node) {
    const auto begun = begun_.find(node);
    if (begun == begun_.end()) {
      Step step = (*nodes_)[node].work.begin();
      if (!step) {
        return true;
      }
      begun_.emplace(node, std::move(step));
      return false;
    }
    if (!begun->second()) {
      return false;
    }
    begun_.erase(begun);
    return true;
  }

  std::shared_ptr<const Nodes> nodes_;
  std::vector<size_t> ready_, num_missing_;
  std::vector<std::vector<size_t>> followers_;
  std::map<size_t, Step> begun_;
};

}  // namespace

ExecutableGraph::ExecutableGraph(const Graph& graph) : nodes(std::make_shared<const Nodes>(graph.nodes)) {
  std::set<const void*> unique;
  for (const Node& node : *nodes) {
    unique.insert(node.chains.begin(), node.chains.end());
  }
  chains.assign(unique.begin(), unique.end());
}

Work ExecutableGraph::replay() const {
  Work work{"a graph of " + std::to_string(nodes->size()) + " nodes", [nodes = nodes]() -> Step {
              auto replay = std::make_shared<Replay>(nodes);
              return [replay] { return replay->step(); };
            }};
  for (const Node& node : *nodes) {
    work.amount.flops += node.work.amount.flops;
    work.reads.insert(work.reads.end(), node.work.reads.begin(), node.work.reads.end());
    work.writes.insert(work.writes.end(), node.work.writes.begin(), node.work.writes.end());
  }
  return work;
}

std::vector<std::string> races_within(const Nodes& nodes) {
  std::vector<std::string> races;
  AccessHistory history;
  std::vector<std::vector<bool>> before(nodes.size(),
                                        std::vector<bool>(nodes.size()));  // all that come before
  for (size_t node = 0; node < nodes.size(); ++node) {
    if (!nodes[node].issued) {
      continue;
    }
    for (const size_t direct : nodes[node].after) {
      before[node][direct] = true;
      for (size_t earlier = 0; earlier < direct; ++earlier) {
        if (before[direct][earlier]) {
          before[node][earlier] = true;
        }
      }
    }
    const auto is_ordered = [&](const Issued& earlier) { return before[node][earlier.line]; };
    const auto add = [&](const std::vector<Range>& ranges, bool writes) {
      for (const Range& range : ranges) {
        if (const auto conflict = history.add(range, writes, nodes[node].issued, is_ordered)) {
          races.push_back("in a captured graph, " + conflict->text());
        }
      }
    };
    add(nodes[node].work.reads, false);
    add(nodes[node].work.writes, true);
  }
  return races;
}

}  // namespace simulated_gpu
