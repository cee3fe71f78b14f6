#include "planner/shortest_paths.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "planner/steps.h"

namespace funcol {
namespace {

Layout without_masks(Layout layout) {
  for (auto& placement : layout.placements) {
    placement = placement.mask != 0 ? Placement::replicate() : placement;
  }
  return layout;
}

}  // namespace

ShortestPaths::ShortestPaths(const Mesh& mesh, const Costs& costs, std::vector<int64_t> shape,
                             int64_t itemsize, Layout source, std::vector<Placement> vocabulary)
    : shape_(std::move(shape)),
      itemsize_(itemsize),
      source_(std::move(source)),
      vocabulary_(std::move(vocabulary)),
      space_(mesh, shape_, itemsize_, source_, vocabulary_),
      costs_(costs) {
  if (const auto of_axis = placements_to_price(); !of_axis.empty()) {
    price_all(of_axis);
    return;
  }
  // The first steps apply the masks of the source.
  double cost = 0;
  const int64_t bytes = space_.largest_shard(space_.src()).bytes;
  for (size_t axis = 0; axis < source_.placements.size(); ++axis) {
    if (source_.placements[axis].mask != 0) {
      cost += costs_.of(size_of_mask(StepKind::kApplyMask, static_cast<int64_t>(axis), bytes));
    }
  }
  open(node_of(space_.src()), cost, false);
}

std::vector<std::vector<Placement>> ShortestPaths::placements_to_price() const {
  if (costs_.rings().empty() || source_.order != default_shard_order(source_.placements)) {
    return {};
  }
  size_t num_layouts = 1;
  std::vector<std::vector<Placement>> of_axis(source_.placements.size());
  for (size_t axis = 0; axis < of_axis.size(); ++axis) {
    auto& placements = of_axis[axis];
    if (space_.slot(static_cast<int64_t>(axis)) < 0) {
      placements = {source_.placements[axis]};
      continue;
    }
    placements = vocabulary_;
    placements.push_back(Placement::replicate());
    if (source_.placements[axis].mask == 0 &&
        std::ranges::find(placements, source_.placements[axis]) == placements.end()) {
      placements.push_back(source_.placements[axis]);
    }
    num_layouts *= placements.size();
    if (num_layouts > kMostPriced) {
      return {};
    }
  }
  return of_axis;
}

void ShortestPaths::price_all(const std::vector<std::vector<Placement>>& of_axis) {
  const auto bytes = static_cast<double>(num_elements(shape_) * itemsize_);
  std::vector<size_t> digits(of_axis.size(), 0);
  Layout target = source_;
  while (true) {
    for (size_t axis = 0; axis < digits.size(); ++axis) {
      target.placements[axis] = of_axis[axis][digits[axis]];
    }
    target.order = default_shard_order(target.placements);
    const double cost = dtensor_cost(source_, target, bytes, costs_.rings());
    if (cost != kImpossible) {
      const State state = space_.state(target);
      nodes_[node_of(state)].known = cost;
      settled_.push_back({state, cost});
    }
    size_t axis = digits.size();
    while (axis > 0 && ++digits[axis - 1] == of_axis[axis - 1].size()) {
      digits[--axis] = 0;
    }
    if (axis == 0) {
      break;
    }
  }
  std::ranges::stable_sort(settled_, {}, &Settled::cost);
}

double ShortestPaths::cost_to(const Layout& target) {
  if (target == source_) {
    return 0;
  }
  if (!may_lead_to(target)) {
    return kImpossible;
  }
  const int node = node_of(space_.state(without_masks(target)));
  while (nodes_[node].known == kUnknown) {
    if (!settle()) {
      return kImpossible;
    }
  }
  return nodes_[node].known + cost_of_masks(target);
}

const ShortestPaths::Settled* ShortestPaths::nearest(size_t n) {
  while (settled_.size() <= n) {
    if (!settle()) {
      return nullptr;
    }
  }
  return &settled_[n];
}

double ShortestPaths::at_least(size_t n) const { return n < settled_.size() ? settled_[n].cost : frontier(); }

double ShortestPaths::mask_cost(const State& layout) const {
  constexpr int64_t kAnyAxis = 0;  // the step is local, so the axis does not matter
  return costs_.of(size_of_mask(StepKind::kMask, kAnyAxis, space_.largest_shard(layout).bytes));
}

double ShortestPaths::cost_of_masks(const Layout& target) const {
  const auto num_masks =
      std::ranges::count_if(target.placements, [](const auto& placement) { return placement.mask != 0; });
  return num_masks == 0 ? 0 : static_cast<double>(num_masks) * mask_cost(space_.state(without_masks(target)));
}

bool ShortestPaths::may_lead_to(const Layout& target) const {
  for (size_t axis = 0; axis < target.placements.size(); ++axis) {
    const auto& placement = target.placements[axis];
    const bool has_dim = placement.dim < static_cast<int64_t>(shape_.size());
    const bool keeps_mask = placement.mask != 0 && placement == source_.placements[axis];
    if (keeps_mask || (placement.is_shard() && (!has_dim || space_.split(placement.split_factor) < 0))) {
      return false;
    }
  }
  return true;
}

bool ShortestPaths::settle() {
  if (last_ >= 0) {
    expand_last();
  }
  while (!queue_.empty()) {
    const Entry entry = queue_.front();
    std::ranges::pop_heap(queue_, std::less<>());
    queue_.pop_back();
    if (!entry.ends) {
      if (nodes_[entry.node].closed) {
        continue;
      }
      nodes_[entry.node].closed = true;
      last_ = entry.node;
    }
    const State layout = space_.without_final(states_[entry.node]);
    Node& node = nodes_[node_of(layout)];
    if (node.known == kUnknown) {
      node.known = entry.cost;
      settled_.push_back({layout, entry.cost});
      return true;
    }
    if (last_ >= 0) {
      expand_last();
    }
  }
  return false;
}

void ShortestPaths::expand_last() {
  // Copies, because the loop below adds nodes.
  const State state = states_[last_];
  const double cost = nodes_[last_].cost;
  const LargestShard shard = space_.largest_shard(state);
  const auto open_next = [&](StepKind kind, const Space::SlotGroup& group, const State& next, bool ends) {
    const int node = node_of(next);
    if (!nodes_[node].closed && nodes_[node].cost > cost) {
      open(node, cost + costs_.of(space_.move(kind, group, state, shard, next).size), ends);
    }
  };
  space_.expand(state, shard, [&](StepKind kind, const Space::SlotGroup& group, const State& next) {
    open_next(kind, group, next, false);
  });
  if (state == space_.src()) {
    space_.expand_exchanges([&](StepKind kind, const Space::SlotGroup& group, const State& next) {
      open_next(kind, group, space_.without_final(next), true);
    });
  }
  last_ = -1;
}

void ShortestPaths::open(int node, double cost, bool ends) {
  if (!ends) {
    if (cost >= nodes_[node].cost) {
      return;
    }
    nodes_[node].cost = cost;
  }
  queue_.push_back({cost, node, ends});
  std::ranges::push_heap(queue_, std::less<>());
}

int ShortestPaths::node_of(const State& state) {
  const auto [number, is_new] = states_.insert(state);
  if (is_new) {
    nodes_.emplace_back();
  }
  return number;
}

double ShortestPaths::frontier() const {
  if (last_ >= 0) {
    return nodes_[last_].cost;
  }
  if (queue_.empty()) {
    return kImpossible;
  }
  return queue_.front().cost;
}

std::vector<double> redistribution_costs(const std::vector<Layout>& sources,
                                         const std::vector<Layout>& targets, const TensorMeta& meta,
                                         const Mesh& mesh, const CostModel& model) {
  std::vector<Placement> vocabulary;
  for (const auto& target : targets) {
    for (const auto& placement : target.placements) {
      if (std::ranges::find(vocabulary, placement) == vocabulary.end()) {
        vocabulary.push_back(placement);
      }
    }
  }
  const Costs costs(model, mesh);
  const auto has_own_order = [](const Layout& layout) { return !is_default(layout.order); };
  const bool one_by_one = !costs.rings().empty() && std::ranges::none_of(sources, has_own_order) &&
                          std::ranges::none_of(targets, has_own_order);
  const auto bytes = static_cast<double>(num_elements(meta.shape) * itemsize(meta.dtype));
  std::vector<double> table;
  table.reserve(sources.size() * targets.size());
  for (const auto& source : sources) {
    if (one_by_one) {
      for (const auto& target : targets) {
        table.push_back(dtensor_cost(source, target, bytes, costs.rings()));
      }
      continue;
    }
    ShortestPaths paths(mesh, costs, meta.shape, itemsize(meta.dtype), source, vocabulary);
    for (const auto& target : targets) {
      table.push_back(paths.cost_to(target));
    }
  }
  return table;
}

}  // namespace funcol
