#include "planner/plan.h"

#include <algorithm>

#include "layout/shards.h"

namespace funcol {
namespace {

// Returns the dims that `axes` shard in `layout` ("0, 1") if `dims`, else their other placements ("sum",
// "R"), each once.
std::string placements_text(const Layout& layout, AxisSet axes, bool dims) {
  std::vector<std::string> seen;
  for (size_t axis = 0; axis < layout.placements.size(); ++axis) {
    const auto& placement = layout.placements[axis];
    if (!contains(axes, static_cast<int64_t>(axis)) || placement.is_shard() != dims) {
      continue;
    }
    std::string word = dims                       ? std::to_string(placement.dim)
                       : placement.is_replicate() ? "R"
                                                  : std::string(to_string(placement.op));
    if (std::ranges::find(seen, word) == seen.end()) {
      seen.push_back(std::move(word));
    }
  }
  std::string text;
  for (const auto& word : seen) {
    text += (text.empty() ? "" : ", ") + word;
  }
  return text;
}

std::string subject(const Step& step) {
  const std::string from = placements_text(step.before, step.axes, true);
  const std::string to = placements_text(step.after, step.axes, true);
  switch (step.kind) {
    case StepKind::kAllGather:
      return "dim " + from;
    case StepKind::kSplit:
      return "dim " + to;
    case StepKind::kReduceScatter:
      return placements_text(step.before, step.axes, false) + ", dim " + to;
    case StepKind::kAllReduce:
    case StepKind::kApplyMask:
      return placements_text(step.before, step.axes, false);
    case StepKind::kAllToAll:
    case StepKind::kPermute:
      return "dim " + from + " -> " + to;
    case StepKind::kToPartial:
    case StepKind::kMask:
      return placements_text(step.after, step.axes, false);
    case StepKind::kEmbed:
      return "dim " + from + " -> " + placements_text(step.after, step.axes, false);
  }
  return "";
}

}  // namespace

std::string to_string(const Step& step, const Mesh& mesh) {
  return std::string(to_string(step.kind)) + "(" + subject(step) + ", " + mesh.names_of(step.axes, "+") + ")";
}

std::string to_string(const Plan& plan) {
  std::string text = to_string(plan.src);
  for (const auto& step : plan.steps) {
    text += (num_axes(step.axes) > 1 ? "-->" : "->") + to_string(step.after);
  }
  return text;
}

std::vector<int64_t> logical_shape(const Layout& layout, const Mesh& mesh, const std::vector<int64_t>& shape,
                                   AxisSet axes, const Coordinate& coordinate) {
  Layout others = layout;
  for (auto& cuts : others.order) {
    std::erase_if(cuts, [&](int64_t axis) { return contains(axes, axis); });
  }
  return local_shape(others, mesh, shape, coordinate);
}

}  // namespace funcol
