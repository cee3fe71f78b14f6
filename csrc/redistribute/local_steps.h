// The steps of a plan as one rank does them.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "redistribute/executor.h"
#include "redistribute/flat_step.h"

namespace funcol {

// A tensor on its way through the steps.
struct Value {
  at::Tensor tensor;
  bool is_callers;          // its memory is that of the tensor that the caller gave
  bool may_change = false;  // and the caller may write to it while a collective that reads it still runs
};

class LocalStep {
 public:
  virtual ~LocalStep() = default;
  virtual Value run(const Value& value, const MaskHooks& masks) const = 0;

  // The same for a tensor that no layer watches and that needs no gradient.
  virtual Value run_plain(const Value& value, const MaskHooks& masks) const { return run(value, masks); }

  // Raises what run() would raise for a tensor of this dtype and device before it sends anything.
  virtual void check(const at::Tensor& /*tensor*/) const {}

  // The same as a part of a collective of several tensors; null for steps that send nothing. What it gives
  // has to be finished.
  virtual std::shared_ptr<const FlatStep> flat() const { return nullptr; }
  virtual at::Tensor finish(at::Tensor moved) const { return moved; }
};

// The rank at `coordinate` takes `step` of `plan`. Throws if the plan contradicts itself or a group is
// missing.
std::unique_ptr<LocalStep> make_local_step(const Plan& plan, const Step& step, const AxisGroups& groups,
                                           const Coordinate& coordinate);

}  // namespace funcol
