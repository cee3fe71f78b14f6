// Runs a plan on the tensor of one rank.
//
// Steps follow each other on pending tensors: none waits on its own account, and the last may stay pending.
// Where a layer of PyTorch watches, or a gradient is needed, all goes through the dispatcher as functional
// collectives and the layout changes around them.
//
// Worked case, (5, 3) S(0)S(0) -> RR on 2 x 2 ranks, one all_gather over both axes: the ranks hold rows 0 1,
// 2, 3, 4, so the gather has split_sizes 2, 1, 1, 1.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "planner/plan.h"

namespace funcol {

// A process group along axes of a mesh.
struct AxisGroup {
  c10::IValue group;  // as the funcol ops take it: a name, or a ProcessGroup
  std::vector<int64_t>
      members;  // as GroupRanks takes them; empty if the ranks count up along the last axis first
};
using AxisGroups = std::map<AxisSet, AxisGroup>;

// What a masked partial does, which the plan does not know. Neither writes to its argument.
struct MaskHooks {
  std::function<at::Tensor(const at::Tensor&, int64_t axis)> apply;  // MaskP -> P
  std::function<at::Tensor(const at::Tensor&, int64_t axis)> mask;   // R -> MaskP
};

class LocalStep;
struct Value;

// A plan made ready for one rank: sizes and positions worked out, groups found.
class Execution {
 public:
  // ValueError if a step runs along axes that `groups` does not have.
  Execution(const Plan& plan, const AxisGroups& groups, const Coordinate& coordinate);
  ~Execution();
  Execution(Execution&&) noexcept;
  Execution& operator=(Execution&&) noexcept;

  // The rank's tensor in the plan's dst layout: contiguous, its memory shared with `local` only if the plan
  // has no steps, in which case it is `local`. Pending, if at all, only with `async_op`.
  // ValueError, before anything is sent, if `local` has not the shape that the plan's src layout gives it.
  at::Tensor run(const at::Tensor& local, bool async_op, const MaskHooks& masks = {}) const;

  // That of this rank's tensor in the plan's src layout.
  const std::vector<int64_t>& shape_before() const { return shape_before_; }
  bool fits(const at::Tensor& local) const;

  // Raises what run() would raise for `local` before it sends anything.
  void check(const at::Tensor& local) const;

  // The same number for executions on one mesh, of whatever sizes, that one collective can serve at each
  // step.
  uint64_t steps_id() const { return steps_id_; }
  const std::vector<std::unique_ptr<LocalStep>>& steps() const { return steps_; }
  int64_t peak_bytes() const { return peak_bytes_; }
  // The plan in PyTorch's arrow notation: "S(0)R->RR".
  const std::string& trace() const { return trace_; }

 private:
  std::vector<std::unique_ptr<LocalStep>> steps_;
  uint64_t steps_id_ = 0;
  int64_t peak_bytes_;
  std::vector<int64_t> shape_before_;
  std::vector<int64_t> whole_shape_;
  std::string src_;
  std::string trace_;
};

// What is left to do when the last step is done: `value` as run() returns it, but for waiting.
at::Tensor own_result(const Value& value);

// Execution(plan, groups, coordinate).run(local, async_op, masks).
at::Tensor execute(const Plan& plan, const at::Tensor& local, const AxisGroups& groups,
                   const Coordinate& coordinate, bool async_op, const MaskHooks& masks = {});

}  // namespace funcol
