#include <utility>

#include "async/async_tensor.h"
#include "comm/agreement.h"
#include "comm/backend_call.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/gradient.h"
#include "ops/operator.h"

namespace funcol {
namespace all_reduce {
namespace {

using c10::IValue;
using Tensors = std::vector<at::Tensor>;

// Reduces `outputs` in place; they are contiguous.
StartedCollective reduce_in_place(std::vector<at::Tensor> outputs, const c10d::ReduceOp& reduce_op,
                                  const GroupPtr& group, const char* op) {
  agree_if_checked(*group, op, at::TensorList(outputs), reduce_op_name(reduce_op));
  std::vector<at::Tensor> wires;
  wires.reserve(outputs.size());
  for (const auto& output : outputs) {
    wires.push_back(wire_for_reduction(output));
  }
  const auto op_on_wire = op_for_reduction(reduce_op, wires[0].scalar_type());
  auto work = on_backend(*group, wires[0].device().type(), [&](auto& target) {
    if (wires.size() == 1) {
      c10d::AllreduceOptions options;
      options.reduceOp = op_on_wire;
      return target.allreduce(wires, options);
    }
    c10d::AllreduceCoalescedOptions options;
    options.reduceOp = op_on_wire;
    return target.allreduce_coalesced(wires, options);
  });
  return {op, group, std::move(work), {}, std::move(outputs), {}};
}

Tensors rule(const Tensors& gradients, const autograd::Values& values, const autograd::Data& data) {
  constexpr auto kOp = "all_reduce";
  const auto& reduce_op = data[0];
  const auto& group = data[1];
  const auto total = call::all_reduce(gradients[0], autograd::totalling_op(reduce_op, kOp), group);
  return autograd::reduction_gradients({total}, values.inputs, values.outputs, reduce_op, group, kOp);
}

Tensors coalesced_rule(const Tensors& gradients, const autograd::Values& values, const autograd::Data& data) {
  constexpr auto kOp = "all_reduce_coalesced";
  const auto& reduce_op = data[0];
  const auto& group = data[1];
  auto totals = call::all_reduce_coalesced(gradients, autograd::totalling_op(reduce_op, kOp), group);
  return autograd::reduction_gradients(std::move(totals), values.inputs, values.outputs, reduce_op, group,
                                       kOp);
}

const auto kInPlace =
    in_place({.name = "all_reduce_"},
             from_stack(+[](const at::Tensor& tensor, const c10d::ReduceOp& reduce_op,
                            const GroupPtr& group) { return start_all_reduce_(tensor, reduce_op, group); }));

const auto kCoalescedInPlace =
    in_place({.name = "all_reduce_coalesced_"}, from_stack(start_all_reduce_coalesced_));

}  // namespace
}  // namespace all_reduce

void check_all_reduce(at::TensorList inputs, const c10d::ReduceOp& reduce_op, c10d::ProcessGroup& group,
                      const char* op) {
  if (!inputs.empty()) {
    check_one_device_and_dtype(inputs, op);
    check_reduction(inputs[0], reduce_op, group, op);
  }
}

StartedCollective start_all_reduce(const at::Tensor& input, const c10d::ReduceOp& reduce_op,
                                   const GroupPtr& group) {
  const BelowAutograd below_autograd;
  settle(input);
  check_all_reduce(input, reduce_op, *group, "all_reduce");
  return all_reduce::reduce_in_place({contiguous_copy(input)}, reduce_op, group, "all_reduce");
}

StartedCollective start_all_reduce_coalesced(at::TensorList inputs, const c10d::ReduceOp& reduce_op,
                                             const GroupPtr& group) {
  constexpr auto kOp = "all_reduce_coalesced";
  if (inputs.empty()) {
    return {kOp, group, {}, {}, {}, {}};
  }
  const BelowAutograd below_autograd;
  check_all_reduce(inputs, reduce_op, *group, kOp);
  settle(inputs);
  return all_reduce::reduce_in_place(contiguous_copies(inputs), reduce_op, group, kOp);
}

StartedCollective start_all_reduce_(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op,
                                    const GroupPtr& group, const char* op) {
  const BelowAutograd below_autograd;
  check_dense(tensor, op);
  settle(tensor);
  check_in_place(tensor, op);
  check_all_reduce(tensor, reduce_op, *group, op);
  return all_reduce::reduce_in_place({tensor}, reduce_op, group, op);
}

StartedCollective start_all_reduce_coalesced_(at::TensorList tensors, const c10d::ReduceOp& reduce_op,
                                              const GroupPtr& group) {
  constexpr auto kOp = "all_reduce_coalesced_";
  if (tensors.empty()) {
    return {kOp, group, {}, {}, {}, {}};
  }
  const BelowAutograd below_autograd;
  check_all_reduce(tensors, reduce_op, *group, kOp);
  for (const auto& tensor : tensors) {
    settle(tensor);
    check_in_place(tensor, kOp);
  }
  return all_reduce::reduce_in_place(tensors.vec(), reduce_op, group, kOp);
}

const decltype(call::all_reduce) call::all_reduce({.name = "all_reduce"}, start_all_reduce,
                                                  {.rule = all_reduce::rule,
                                                   .saves_reduce_op = true,
                                                   .is_in_core = true});

const decltype(call::all_reduce_coalesced) call::all_reduce_coalesced({.name = "all_reduce_coalesced"},
                                                                      start_all_reduce_coalesced,
                                                                      {.rule = all_reduce::coalesced_rule,
                                                                       .saves_reduce_op = true,
                                                                       .check = check_one_device_and_dtype,
                                                                       .is_in_core = true});

}  // namespace funcol
