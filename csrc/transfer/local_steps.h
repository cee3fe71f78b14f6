// The steps of a plan, on one rank's tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>

#include "transfer/executor.h"
#include "transfer/packed_exchange.h"

namespace funcol {

// A rank's tensor between two steps.
struct LocalTensor {
  at::Tensor tensor;
  bool is_callers;          // it shares memory with the caller's tensor
  bool may_change = false;  // the caller may write to that memory while a collective still reads it
};

// A step of a plan on one rank. All its forms send the same bytes in the same order, so ranks may differ in
// the form that they take. Steps that go together by flat() do so on all ranks.
class LocalStep {
 public:
  virtual ~LocalStep() = default;
  virtual LocalTensor run(const LocalTensor& local, const MaskHooks& masks) const = 0;

  // Runs the step on a tensor that no layer observes and that needs no gradient.
  virtual LocalTensor run_plain(const LocalTensor& local, const MaskHooks& masks) const {
    return run(local, masks);
  }

  // Runs like run_plain(), on the CPU: bypasses the dispatcher, and returns once the result has arrived.
  virtual LocalTensor run_now(const LocalTensor& local, const MaskHooks& masks) const {
    return run(local, masks);
  }

  // Raises what run() would raise for a tensor of this dtype and device before it sends anything.
  virtual void check(const at::Tensor& /*tensor*/) const {}

  // Returns the step as a part of a collective of several tensors, or null if it sends nothing. complete()
  // completes the result of that collective.
  virtual std::shared_ptr<const PackedExchange> flat() const { return nullptr; }
  // Returns the signature of flat(), without making it; an empty text if the step sends nothing.
  virtual std::string_view signature() const { return {}; }
  virtual at::Tensor complete(at::Tensor moved) const { return moved; }
};

// Makes `step` for the rank at `coordinate`. Throws if the plan contradicts itself or a group is missing.
std::unique_ptr<LocalStep> make_local_step(const Plan& plan, const Step& step, const AxisGroups& groups,
                                           const Coordinate& coordinate);

}  // namespace funcol
