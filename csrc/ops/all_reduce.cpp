#include <utility>

#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "comm/agreement.h"
#include "comm/backend_call.h"
#include "comm/process_group.h"
#include "ops/backend_tensor.h"
#include "ops/calls.h"
#include "ops/collectives.h"
#include "ops/core_call.h"
#include "ops/core_forwarding.h"
#include "ops/dense_check.h"
#include "ops/meta.h"
#include "ops/reduction_rules.h"

namespace funcol {
namespace all_reduce {
namespace {

void check_in_place(const at::Tensor& tensor, const char* op) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), "funcol::", op, ": the tensor of shape ", tensor.sizes(),
                    " has strides ", tensor.strides(),
                    ". An in-place collective needs a contiguous tensor: call .contiguous() first.");
}

// Reduces `outputs` in place; they are contiguous.
StartedCollective reduce_in_place(std::vector<at::Tensor> outputs, const c10d::ReduceOp& reduce_op,
                                  const GroupPtr& group, const char* op) {
  if (agreement_is_checked()) {
    agree(*group, op, std::string(reduce_op_name(reduce_op)), describe_tensors(outputs));
  }
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

}  // namespace
}  // namespace all_reduce

void check_all_reduce(at::TensorList inputs, const c10d::ReduceOp& reduce_op, c10d::ProcessGroup& group,
                      const char* op) {
  if (!inputs.empty()) {
    check_alike(inputs, op);
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
  for (const auto& input : inputs) {
    settle(input);
  }
  return all_reduce::reduce_in_place(contiguous_copies(inputs), reduce_op, group, kOp);
}

StartedCollective start_all_reduce_(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op,
                                    const GroupPtr& group, const char* op) {
  const BelowAutograd below_autograd;
  check_dense(tensor, op);
  settle(tensor);
  all_reduce::check_in_place(tensor, op);
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
    all_reduce::check_in_place(tensor, kOp);
  }
  return all_reduce::reduce_in_place(tensors.vec(), reduce_op, group, kOp);
}

namespace all_reduce {
namespace {

using c10::IValue;
using Tensors = std::vector<at::Tensor>;

at::Tensor meta(const at::Tensor& input, const IValue&, const IValue&) { return meta_like(input); }

Tensors coalesced_meta(at::TensorList inputs, const IValue&, const IValue&) {
  return meta_of_each(inputs, meta_like);
}

at::Tensor traced(const at::Tensor& input, const IValue& reduce_op, const IValue& group) {
  return core::call_and_wait("all_reduce", {input, reduce_op, group});
}

Tensors coalesced_traced(at::TensorList inputs, const IValue& reduce_op, const IValue& group) {
  return core::call_list_and_wait("all_reduce_coalesced", {inputs, reduce_op, group});
}

Tensors rule(const Tensors& gradients, const autograd::Values& values, const autograd::Data& data) {
  const auto& reduce_op = data[0];
  const auto& group = data[1];
  const GradientCollectives collectives;
  const auto total = call::all_reduce(gradients[0], autograd::totalling_op(reduce_op, "all_reduce"), group);
  return autograd::reduction_gradients({total}, values.inputs, values.outputs, reduce_op, group,
                                       "all_reduce");
}

at::Tensor recorded(const at::Tensor& input, const IValue& reduce_op, const IValue& group) {
  return autograd::record(input, call::all_reduce.unrecorded(input, reduce_op, group), "all_reduce", rule,
                          {reduce_op, group}, autograd::depends_on_values(reduce_op, "all_reduce"));
}

Tensors coalesced_rule(const Tensors& gradients, const autograd::Values& values, const autograd::Data& data) {
  constexpr auto kOp = "all_reduce_coalesced";
  const auto& reduce_op = data[0];
  const auto& group = data[1];
  const GradientCollectives collectives;
  auto totals = call::all_reduce_coalesced(gradients, autograd::totalling_op(reduce_op, kOp), group);
  return autograd::reduction_gradients(std::move(totals), values.inputs, values.outputs, reduce_op, group,
                                       kOp);
}

Tensors coalesced_recorded(at::TensorList inputs, const IValue& reduce_op, const IValue& group) {
  constexpr auto kOp = "all_reduce_coalesced";
  return autograd::record(inputs, call::all_reduce_coalesced.unrecorded(inputs, reduce_op, group), kOp,
                          coalesced_rule, {reduce_op, group}, autograd::depends_on_values(reduce_op, kOp));
}

const auto kInPlace =
    in_place({.schema = "all_reduce_(Tensor(a!) input, Any reduce_op, Any group_name) -> Tensor(a!)"},
             from_stack(+[](const at::Tensor& tensor, const c10d::ReduceOp& reduce_op,
                            const GroupPtr& group) { return start_all_reduce_(tensor, reduce_op, group); }));

const auto kCoalescedInPlace = in_place(
    {.schema = "all_reduce_coalesced_(Tensor[](a!) inputs, Any reduce_op, Any group_name) -> Tensor[](a!)"},
    from_stack(start_all_reduce_coalesced_));

}  // namespace
}  // namespace all_reduce

const decltype(call::all_reduce) call::all_reduce(
    {.schema = "all_reduce(Tensor input, Any reduce_op, Any group_name) -> Tensor"}, start_all_reduce,
    {.meta = all_reduce::meta,
     .traced = all_reduce::traced,
     .recorded = all_reduce::recorded,
     .is_in_core = true});

const decltype(call::all_reduce_coalesced) call::all_reduce_coalesced(
    {.schema = "all_reduce_coalesced(Tensor[] inputs, Any reduce_op, Any group_name) -> Tensor[]"},
    start_all_reduce_coalesced,
    {.meta = all_reduce::coalesced_meta,
     .traced = all_reduce::coalesced_traced,
     .recorded = all_reduce::coalesced_recorded,
     .check = check_alike,
     .is_in_core = true});

}  // namespace funcol
