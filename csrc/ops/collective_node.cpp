#include "ops/collective_node.h"

#include <torch/csrc/dynamo/compiled_autograd.h>

#include "compat/compiled_node.h"

namespace funcol::autograd {
namespace {

namespace compiled = torch::dynamo::autograd;
using torch::autograd::VariableInfo;

// apply(), from the arguments that apply_with_saved() packed.
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

RuleNode::Tensors RuleNode::apply(Tensors&& gradients) {
  Values values;
  {
    const std::scoped_lock lock(mutex_);
    check_not_released();
    for (const auto& input : inputs_) {
      values.inputs.push_back(input.unpack());
    }
    for (const auto& output : outputs_) {
      values.outputs.push_back(output.unpack(getptr()));
    }
  }
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined()) {
      gradients[i] = input_metadata(i).zeros_like();
    }
  }
  const BackwardOf backward(module_);
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

  Values values;
  for (const auto& input : inputs_) {
    values.inputs.push_back(input.unpack());
  }
  for (const auto& output : outputs_) {
    values.outputs.push_back(output.unpack(getptr()));
  }
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

}  // namespace funcol::autograd
