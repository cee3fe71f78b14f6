#include <utility>

#include "async/async_tensor.h"
#include "comm/agreement.h"
#include "comm/backend_call.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/operator.h"

namespace funcol {
namespace broadcast {
namespace {

StartedCollective broadcast_in_place(at::Tensor output, int64_t source, const GroupPtr& group,
                                     const char* op) {
  agree_if_checked(*group, op, output, "src=", source);
  std::vector<at::Tensor> wires{wire_for_movement(output, *group)};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  auto work = on_backend(*group, output.device().type(),
                         [&](auto& target) { return target.broadcast(wires, options); });
  return {op, group, std::move(work), {}, as_list(std::move(output)), {}};
}

std::vector<at::Tensor> rule(const std::vector<at::Tensor>& gradients, const autograd::Values&,
                             const autograd::Data& data) {
  return {call::reduce(gradients[0], "sum", data[0].toInt(), data[1])};
}

const auto kInPlace = in_place(
    {.name = "broadcast_"}, from_stack(+[](const at::Tensor& tensor, int64_t source, const GroupPtr& group) {
      return start_broadcast_(tensor, source, group);
    }));

}  // namespace
}  // namespace broadcast

StartedCollective start_broadcast(const at::Tensor& input, int64_t source, const GroupPtr& group) {
  const BelowAutograd below_autograd;
  check_rank(source, *group, "src", "broadcast");
  check_dense(input, "broadcast");
  settle(input);
  auto output = group->getRank() == source ? contiguous_copy(input) : fresh_tensor(input.sizes(), input);
  return broadcast::broadcast_in_place(std::move(output), source, group, "broadcast");
}

StartedCollective start_broadcast_(const at::Tensor& tensor, int64_t source, const GroupPtr& group,
                                   const char* op) {
  const BelowAutograd below_autograd;
  check_rank(source, *group, "src", op);
  check_dense(tensor, op);
  settle(tensor);
  check_in_place(tensor, op);
  return broadcast::broadcast_in_place(tensor, source, group, op);
}

const decltype(call::broadcast) call::broadcast({.name = "broadcast"}, start_broadcast,
                                                {.rule = broadcast::rule, .is_in_core = true});

}  // namespace funcol
