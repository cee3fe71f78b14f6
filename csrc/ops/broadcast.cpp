#include <utility>

#include "async/async_tensor.h"
#include "comm/agreement.h"
#include "comm/backend_call.h"
#include "ops/collectives.h"
#include "ops/kinds.h"
#include "ops/wire.h"

namespace funcol {
namespace {

Start broadcast_in_place(at::Tensor output, int64_t source, const GroupPtr& group, const char* op) {
  if (agreement_is_checked()) {
    agree(*group, op, c10::str("src=", source), describe_tensors(output));
  }
  std::vector<at::Tensor> wires{wire_for_movement(output, *group)};
  c10d::BroadcastOptions options;
  options.rootRank = source;
  auto work = on_backend(*group, output.device().type(),
                         [&](auto& target) { return target.broadcast(wires, options); });
  return {op, group, std::move(work), {}, as_list(std::move(output)), {}};
}

}  // namespace

void check_broadcast(int64_t source, const c10d::ProcessGroup& group, const char* op) {
  check_rank(source, group, "src", op);
}

Start start_broadcast(const at::Tensor& input, int64_t source, const GroupPtr& group) {
  const BelowAutograd below_autograd;
  check_broadcast(source, *group, "broadcast");
  check_dense(input, "broadcast");
  settle(input);
  auto output = group->getRank() == source ? contiguous_copy(input) : fresh_tensor(input.sizes(), input);
  return broadcast_in_place(std::move(output), source, group, "broadcast");
}

Start start_broadcast_(const at::Tensor& tensor, int64_t source, const GroupPtr& group, const char* op) {
  const BelowAutograd below_autograd;
  check_broadcast(source, *group, op);
  check_dense(tensor, op);
  settle(tensor);
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "funcol::", op, ": the tensor of shape ", tensor.sizes(),
                    " has strides ", tensor.strides(),
                    ". An in-place collective needs a contiguous tensor: call .contiguous() first.");
  return broadcast_in_place(tensor, source, group, op);
}

}  // namespace funcol
