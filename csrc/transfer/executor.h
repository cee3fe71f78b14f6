// Runs a plan on the tensor of one rank.
//
// Steps follow each other on pending tensors: no step waits by itself, and the last result may stay pending.
// If a layer of PyTorch observes operations, or a gradient is needed, all steps go through the dispatcher: as
// functional collectives, with layout changes around them.
//
// Worked case, (5, 3) S(0)S(0) -> RR on 2 x 2 ranks, one all_gather over both axes: the ranks hold rows 0 1,
// 2, 3, 4, so the gather has split_sizes 2, 1, 1, 1.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "planner/plan.h"
#include "transfer/group_ranks.h"
#include "transfer/packed_exchange.h"

namespace funcol {

// The operations of a masked partial, which the plan does not know. Neither writes to its argument.
struct MaskHooks {
  std::function<at::Tensor(const at::Tensor&, int64_t axis)> apply;  // MaskP -> P
  std::function<at::Tensor(const at::Tensor&, int64_t axis)> mask;   // R -> MaskP
};

// The redistributions that this process has begun, and the bytes that the busiest rank of each sends.
// Redistributions without steps do not count.
struct RedistributionCounts {
  int64_t number = 0;
  int64_t bytes = 0;
};
RedistributionCounts redistribution_counts() noexcept;

class LocalStep;
struct LocalTensor;

// A plan prepared for one rank: its sizes and positions are computed, and its groups found.
class Execution {
 public:
  // Raises ValueError if a step runs along axes that `groups` does not have.
  Execution(const Plan& plan, const AxisGroups& groups, const Coordinate& coordinate);
  ~Execution();
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;

  // Returns the rank's tensor in the plan's dst layout: contiguous and in memory of its own if the plan has
  // steps, else unmoved(). The result is pending only with `async_op`. Raises ValueError, before anything is
  // sent, if `local` does not fit.
  at::Tensor run(const at::Tensor& local, bool async_op, const MaskHooks& masks = {}) const;

  // Returns the result of a plan without steps: `local` itself, as in PyTorch, since axes of one rank move
  // nothing. But if such an axis starts or stops cutting a dim before an axis of several ranks, PyTorch
  // returns a contiguous copy, and so does this: on a (1, 2) mesh RS(0)->S(0)S(0).
  at::Tensor unmoved(const at::Tensor& local) const;

  // Returns false once a group of the steps was aborted or reconfigured: check() raises then.
  bool is_current() const;

  // Returns the shape of this rank's tensor in the plan's src layout.
  const std::vector<int64_t>& shape_before() const { return shape_before_; }
  // Returns true if `local` has that shape, or if both are empty.
  bool fits(const at::Tensor& local) const;
  // Returns a fitting `local` in that shape: FSDP2 gives the empty shard (2, 0) the shape (0, 0).
  at::Tensor shaped(const at::Tensor& local) const;

  // Raises what run() would raise for `local` before it sends anything, such as a ValueError if a group was
  // aborted or reconfigured.
  void check(const at::Tensor& local) const;

  // Returns an id that is the same for executions on one mesh if one collective can handle them at each step,
  // whatever their sizes.
  const SharedSignature& steps_id() const { return steps_id_; }
  const std::vector<std::unique_ptr<LocalStep>>& steps() const { return steps_; }
  // Describes step `index` in messages and profiles: "redistribute S(0)->R: all_gather(dim 0, tp)".
  const std::string& step_name(size_t index) const { return step_names_[index]; }
  int64_t peak_bytes() const { return peak_bytes_; }
  size_t heap_bytes() const;
  // Adds a run of the plan to redistribution_counts(); run() does so itself.
  void count_run() const noexcept;
  // Returns the plan in PyTorch's arrow notation: "S(0)R->RR".
  const std::string& trace() const { return trace_; }

 private:
  std::vector<std::unique_ptr<LocalStep>> steps_;
  std::vector<std::string> step_names_;
  std::vector<GroupRef> groups_;  // that the steps communicate in
  SharedSignature steps_id_;
  int64_t peak_bytes_;
  int64_t bytes_sent_ = 0;  // by the busiest rank
  std::vector<int64_t> shape_before_;
  std::vector<int64_t> full_shape_;
  std::string src_;
  std::string trace_;
  bool copies_;  // in unmoved()
};

// Returns the tensor after the last step like run(), except that it may be pending.
at::Tensor own_result(const LocalTensor& local);

}  // namespace funcol
