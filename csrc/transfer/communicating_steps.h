// The steps of a plan that send something.
#pragma once

#include <memory>

#include "transfer/local_steps.h"
#include "transfer/step_geometry.h"

namespace funcol {

// Throws if the plan contradicts itself.
std::unique_ptr<LocalStep> make_communicating_step(const StepGeometry& geometry);

}  // namespace funcol
