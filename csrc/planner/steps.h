// Turns a path of states into the steps of a plan.
#pragma once

#include "planner/masks.h"
#include "planner/state.h"

namespace funcol {

// Returns the most memory that a rank holds during a step: the caller's tensor, the step's input unless the
// step is the first, its output, and the copies around a collective.
int64_t peak_bytes(const StepSize& size, bool first, int64_t src_bytes);

// Returns the largest peak of the steps that apply and make masks, or INT64_MIN if there are no such steps.
int64_t peak_bytes(const Masks& masks, const Space& space);

// Returns the size of a step that applies or makes a mask on a tensor of `bytes`.
StepSize size_of_mask(StepKind kind, int64_t axis, int64_t bytes);

// The steps of a plan, collected in order.
class Steps {
 public:
  // Begins with the steps that apply masks. All arguments must outlive this.
  Steps(const Redistribution& task, const Masks& masks, const Space& space, const Costs& costs);

  void add(const Move& move) { add(move.size, space_.layout(move.next)); }

  // Adds the steps that make masks, and returns the plan.
  Plan finish();

 private:
  void add(const StepSize& size, Layout after);
  void add_mask(StepKind kind, int64_t axis, const Placement& placement);
  const Layout& now() const { return steps_.empty() ? task_.src : steps_.back().after; }

  const Redistribution& task_;
  const Masks& masks_;
  const Space& space_;
  const Costs& costs_;
  const int64_t src_bytes_;
  const int64_t dst_bytes_;
  std::vector<Step> steps_;
};

}  // namespace funcol
