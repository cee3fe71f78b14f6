// The steps of a plan that send something.
#pragma once

#include <memory>

#include "redistribute/local_steps.h"
#include "redistribute/step_geometry.h"

namespace funcol {

// Throws if the plan contradicts itself.
std::unique_ptr<LocalStep> make_communicating_step(const StepGeometry& geometry);

}  // namespace funcol
