#include "redistribute/executor.h"

#include <ATen/ops/clone.h>

#include <algorithm>

#include "async/async_tensor.h"
#include "layout/shards.h"
#include "redistribute/local_steps.h"

namespace funcol {

Execution::Execution(const Plan& plan, const AxisGroups& groups, const Coordinate& coordinate)
    : shape_before_(local_shape(plan.src, plan.mesh, plan.shape, coordinate)),
      whole_shape_(plan.shape),
      src_(to_string(plan.src)) {
  for (const auto& step : plan.steps) {
    steps_.push_back(make_local_step(plan, step, groups, coordinate));
  }
}

Execution::~Execution() = default;
Execution::Execution(Execution&&) noexcept = default;
Execution& Execution::operator=(Execution&&) noexcept = default;

at::Tensor Execution::run(const at::Tensor& local, bool async_op, const MaskHooks& masks) const {
  const auto sizes = local.sym_sizes();
  TORCH_CHECK_VALUE(std::equal(sizes.begin(), sizes.end(), shape_before_.begin(), shape_before_.end()),
                    "funcol::redistribute: the local tensor has shape ", sizes, ", but this rank holds ",
                    at::IntArrayRef(shape_before_), " of a tensor of shape ", at::IntArrayRef(whole_shape_),
                    " under ", src_, ". Pass the shard that belongs to the source spec.");
  if (steps_.empty()) {
    return local;
  }
  Value value{local, /*is_callers=*/true};
  for (const auto& step : steps_) {
    value = step->run(value, masks);
  }
  if (value.is_callers) {
    return at::clone(value.tensor, at::MemoryFormat::Contiguous);
  }
  auto result = value.tensor.contiguous();
  if (!async_op) {
    settle(result);
  }
  return result;
}

at::Tensor execute(const Plan& plan, const at::Tensor& local, const AxisGroups& groups,
                   const Coordinate& coordinate, bool async_op, const MaskHooks& masks) {
  return Execution(plan, groups, coordinate).run(local, async_op, masks);
}

}  // namespace funcol
