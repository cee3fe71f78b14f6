#include "ops/gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/index_fill.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <utility>

#include "async/buffer_release.h"
#include "async/dispatch_modes.h"
#include "comm/process_group.h"
#include "compat/autograd_node.h"
#include "ops/calls.h"

namespace funcol::autograd {
namespace {

namespace compiled = torch::dynamo::autograd;
using torch::autograd::VariableInfo;

// Runs apply() on the arguments that apply_with_saved() packed.
RuleNode::Tensors run_packed(RuleNode::Rule rule, RuleNode::Tensors gradients, compiled::PackedArgs packed) {
  const auto infos = packed.unpack<std::vector<VariableInfo>>();
  at::OptionalDeviceGuard device_guard;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) {
      gradients[i] = infos[i].zeros(device_guard);
    }
  }
  RuleNode::Values values;
  values.inputs = packed.unpack<RuleNode::Tensors>();
  values.outputs = packed.unpack<RuleNode::Tensors>();
  RuleNode::Data data(packed.unpack<size_t>());
  for (auto& value : data) {
    value = packed.unpack<c10::IValue>();
  }
  const GradientCollectives collectives;
  return rule(gradients, values, data);
}

}  // namespace

void RuleNode::save(const Tensors& inputs, const Tensors& outputs) {
  for (const auto& input : inputs) {
    inputs_.emplace_back(input, /*is_output=*/false);
  }
  for (const auto& output : outputs) {
    outputs_.emplace_back(output, /*is_output=*/true);
  }
}

void RuleNode::check_not_released() const {
  TORCH_CHECK(!is_released_, name(),
              ": trying to backward through the graph a second time. Pass retain_graph=True the first time.");
}

RuleNode::Values RuleNode::unpack_values() {
  Values values;
  for (const auto& input : inputs_) {
    values.inputs.push_back(input.unpack());
  }
  for (const auto& output : outputs_) {
    values.outputs.push_back(output.unpack(getptr()));
  }
  return values;
}

RuleNode::Tensors RuleNode::apply(Tensors&& gradients) {
  Values values;
  {
    const std::scoped_lock lock(mutex_);
    check_not_released();
    values = unpack_values();
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) {
      gradients[i] = input_metadata(i).zeros_like();
    }
  }
  const BackwardOf backward(module_);
  const GradientCollectives collectives;
  return rule_(gradients, values, data_);
}

void RuleNode::compiled_args(compiled::CompiledNodeArgs& args) const {
  check_not_released();
  args.collect(reinterpret_cast<uint64_t>(rule_));
  args.collect(data_);
  args.collect(inputs_, /*is_output=*/false);
  args.collect(outputs_, /*is_output=*/true);
  args.collect(output_infos());
}

RuleNode::Tensors RuleNode::apply_with_saved(const Tensors& gradients, compiled::SwapSavedVariables& saved) {
  auto infos = output_infos();
  saved.before(data_);
  saved.before(inputs_);
  saved.before(outputs_);
  saved.before(infos);

  const auto values = unpack_values();
  compiled::PackedArgs packed;
  packed.pack(infos);
  packed.pack(values.inputs);
  packed.pack(values.outputs);
  packed.pack(data_.size());
  for (const auto& value : data_) {
    packed.pack(value);
  }
  std::vector<at::TypePtr> types;
  for (const auto& value : packed.vec()) {
    types.push_back(value.isTensor() ? at::TensorType::get() : value.type());
  }
  auto results =
      compat::call_when_compiled(*this, saved, gradients, packed.vec(), types, /*is_traceable=*/false,
                                 [rule = rule_](const Tensors& inputs, const std::vector<c10::IValue>& args) {
                                   return run_packed(rule, inputs, compiled::PackedArgs(args));
                                 });

  saved.after(data_);
  saved.after(inputs_);
  saved.after(outputs_);
  saved.after(infos);
  return results;
}

std::vector<VariableInfo> RuleNode::output_infos() const {
  std::vector<VariableInfo> infos(num_inputs());
  for (size_t i = 0; i < infos.size(); ++i) {
    const auto& output = input_metadata(i);
    infos[i].layout = output.layout();
    infos[i].device = output.device();
    infos[i].scalar_type = c10::typeMetaToScalarType(output.dtype());
    infos[i].size = output.shape_as_dim_vector().vec();
    infos[i].is_empty = false;
  }
  return infos;
}

void RuleNode::release_variables() {
  const std::scoped_lock lock(mutex_);
  is_released_ = !inputs_.empty();
  inputs_.clear();
  outputs_.clear();
}

bool needs_gradient(at::TensorList inputs) {
  return at::GradMode::is_enabled() && std::ranges::any_of(inputs, [](const at::Tensor& input) {
           return input.defined() && input.requires_grad();
         });
}

Tensors record(at::TensorList inputs, Tensors outputs, const char* op, Rule rule, Data data,
               bool needs_values) {
  const auto node = compat::make_node<RuleNode>(op, rule, std::move(data));
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  torch::autograd::set_history(outputs, node);
  if (needs_values) {
    node->save(inputs.vec(), outputs);
  }
  return outputs;
}

at::Tensor record(const at::Tensor& input, const at::Tensor& output, const char* op, Rule rule, Data data,
                  bool needs_values) {
  return record(at::TensorList(input), Tensors{output}, op, rule, std::move(data), needs_values)[0];
}

IValue saved_sizes(at::OptionalSymIntArrayRef split_sizes) {
  return split_sizes.value_or(c10::SymIntArrayRef());
}

at::Tensor zeros_after(const at::Tensor& empty, c10::SymIntArrayRef sizes) {
  const bool is_watched = at::GradMode::is_enabled() || has_active_layers() || belongs_to_layer(empty);
  return (is_watched ? empty.sum() : at::zeros({}, empty.options())).expand_symint(sizes);
}

namespace {

using Kind = c10d::ReduceOp::RedOpType;

at::Tensor scaled_by_factor(const at::Tensor& total, const c10d::ReduceOp& reduce_op) {
  const auto& supplement = static_cast<const c10d::NCCLPreMulSumSupplement&>(*reduce_op.supplement_);
  return supplement.tensor_factor.defined() ? total * supplement.tensor_factor.to(total.dtype())
                                            : total * supplement.double_factor;
}

// Shares `total` equally between the ranks that hold the extremum. Their number is summed in float, which is
// exact.
at::Tensor routed_to_extremum(const at::Tensor& total, const at::Tensor& input, const at::Tensor& result,
                              const IValue& group) {
  const auto holds = (input == result).logical_or(at::isnan(input).logical_and(at::isnan(result)));
  const auto num_holders = call::all_reduce(holds.to(at::kFloat), "sum", group);
  const auto share = (total / num_holders).to(total.scalar_type());
  return at::where(holds, share, at::zeros({}, share.options()));
}

// Gathers all factors rather than divide by this rank's own, which may be zero, and so that it can be
// differentiated again.
at::Tensor times_other_factors(const at::Tensor& total, const at::Tensor& input, const IValue& group,
                               const char* op) {
  const auto rank = group_from_ivalue(group, op)->getRank();
  const auto factors = call::all_gather_along_dim(input.unsqueeze(0), 0, group, {});
  const auto own = at::scalar_tensor(rank, input.options().dtype(at::kLong));
  return total * at::index_fill(factors, 0, own, 1).prod(0);
}

}  // namespace

IValue totalling_op(const IValue& reduce_op, const char* op) {
  return reduce_op_from_ivalue(reduce_op, op).op_ == Kind::AVG ? "avg" : "sum";
}

at::Tensor weighted(const at::Tensor& gradient, const IValue& reduce_op, const IValue& group,
                    const char* op) {
  const bool is_mean = reduce_op_from_ivalue(reduce_op, op).op_ == Kind::AVG;
  return is_mean ? gradient / group_from_ivalue(group, op)->getSize() : gradient;
}

bool depends_on_values(const c10d::ReduceOp& reduce_op) {
  const Kind kind = reduce_op.op_;
  return kind == Kind::MIN || kind == Kind::MAX || kind == Kind::PRODUCT;
}

at::Tensor reduction_gradient(const at::Tensor& total, const at::Tensor& input, const at::Tensor& result,
                              const IValue& reduce_op, const IValue& group, const char* op) {
  const auto resolved = reduce_op_from_ivalue(reduce_op, op);
  switch (resolved.op_) {
    case Kind::SUM:
    case Kind::AVG:
      return total;
    case Kind::PREMUL_SUM:
      return scaled_by_factor(total, resolved);
    case Kind::MIN:
    case Kind::MAX:
      return routed_to_extremum(total, input, result, group);
    case Kind::PRODUCT:
      return times_other_factors(total, input, group, op);
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "funcol::", op, ": reduce op '", reduce_op_name(resolved),
                                  "' has no gradient. Detach the input, or use a reduce op that has one.");
  }
}

Tensors reduction_gradients(Tensors totals, const Tensors& inputs, const Tensors& results,
                            const IValue& reduce_op, const IValue& group, const char* op) {
  for (size_t i = 0; i < totals.size(); ++i) {
    totals[i] = inputs.empty() ? reduction_gradient(totals[i], {}, {}, reduce_op, group, op)
                               : reduction_gradient(totals[i], inputs[i], results[i], reduce_op, group, op);
  }
  return totals;
}

}  // namespace funcol::autograd
