#include "planner/masks.h"

#include <stdexcept>

namespace funcol {

Masks::Masks(const Redistribution& task) : unmasked_(task) {
  for (size_t axis = 0; axis < task.src.placements.size(); ++axis) {
    Placement& from = unmasked_.src.placements[axis];
    Placement& to = unmasked_.dst.placements[axis];
    if (from.mask != 0 && from == to) {
      if (task.src != task.dst) {
        throw std::invalid_argument(
            "plan_redistribution: " + to_string(from) + " of mesh axis " +
            task.mesh.name(static_cast<int64_t>(axis)) +
            " stays, but the tensor that its mask belongs to changes: " + to_string(task.src) + " -> " +
            to_string(task.dst) + ". Reduce it as well.");
      }
      continue;
    }
    if (from.mask != 0) {
      applied_.push_back(static_cast<int64_t>(axis));
      from.mask = 0;
    }
    if (to.mask != 0) {
      masked_.push_back(static_cast<int64_t>(axis));
      to = Placement::replicate();
    }
  }
}

}  // namespace funcol
