// The steps of a plan as one rank does them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "redistribute/executor.h"

namespace funcol {

// A tensor on its way through the steps.
struct Value {
  at::Tensor tensor;
  bool is_callers;  // its memory is that of the tensor that the caller gave
};

class LocalStep {
 public:
  virtual ~LocalStep() = default;
  virtual Value run(const Value& value, const MaskHooks& masks) const = 0;
};

// The rank at `coordinate` takes `step` of `plan`. Throws if the plan contradicts itself or a group is
// missing.
std::unique_ptr<LocalStep> make_local_step(const Plan& plan, const Step& step, const AxisGroups& groups,
                                           const Coordinate& coordinate);

}  // namespace funcol
