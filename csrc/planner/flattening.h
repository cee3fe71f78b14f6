// Finds plans that a flattened mesh would shorten.
#pragma once

#include <optional>
#include <string>

#include "planner/plan.h"

namespace funcol {

// The axes of a plan that lack a process group together, and the number of steps with one.
struct Flattening {
  AxisSet axes = 0;
  size_t num_steps = 0;

  friend bool operator==(const Flattening&, const Flattening&) = default;
};

// Returns the axes along which `plan` communicates if a group of them together allows a plan of fewer steps
// and no more memory: the one of least cost by default_alpha_beta(). Runs one plan search. Worked case:
// S(0)S(1) -> S(1)S(0) on two axes of a larger mesh takes one step with a group of both, and three without.
std::optional<Flattening> flattening_of(const Plan& plan);

// Returns the advice to make that group: "1 step in place of 3 with a process group of a, b together: call
// mesh["a", "b"]._flatten() first". Returns "" if no group helps.
std::string flattening_hint(const Plan& plan);

}  // namespace funcol
