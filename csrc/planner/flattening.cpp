#include "planner/flattening.h"

#include <algorithm>

#include "planner/search.h"

namespace funcol {

std::optional<Flattening> flattening_of(const Plan& plan) {
  AxisSet axes = 0;
  for (const auto& step : plan.steps) {
    axes |= communicates(step.kind) ? step.axes : 0;
  }
  auto mesh = plan.mesh;
  if (plan.steps.size() < 2 || axes == 0 || mesh.has_group(axes)) {
    return std::nullopt;
  }
  mesh.merged.push_back(axes);
  const auto model = default_alpha_beta(mesh);
  const auto shorter = plan_redistribution({mesh, plan.shape, plan.itemsize, plan.src, plan.dst}, model);
  return shorter.steps.size() < plan.steps.size() && shorter.peak_bytes <= plan.peak_bytes
             ? std::optional(Flattening{axes, shorter.steps.size()})
             : std::nullopt;
}

std::string flattening_hint(const Plan& plan) {
  const auto found = flattening_of(plan);
  if (!found) {
    return "";
  }
  const auto& mesh = plan.mesh;
  const auto how = mesh.names.empty()
                       ? "name the dims of the mesh, and call _flatten() on these first"
                       : "call mesh[" + mesh.names_of(found->axes, ", ", "\"") + "]._flatten() first";
  return std::to_string(found->num_steps) + (found->num_steps == 1 ? " step" : " steps") + " in place of " +
         std::to_string(plan.steps.size()) + " with a process group of " + mesh.names_of(found->axes, ", ") +
         " together: " + how;
}

}  // namespace funcol
