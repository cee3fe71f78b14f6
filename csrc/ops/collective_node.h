// A node of autograd for collectives with several inputs or outputs, or with outputs of the caller.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable_info.h>

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/call_site.h"

namespace funcol::autograd {

// Makes the gradients of all inputs from the gradients of all outputs, by a rule.
//
// As differentiable as the rule. An unused output has a gradient of zeros, since ranks must agree on what
// they send. To compiled autograd the node is opaque.
class RuleNode final : public torch::autograd::Node {
 public:
  using Tensors = torch::autograd::variable_list;
  using Data = std::vector<c10::IValue>;
  struct Values {
    Tensors inputs;
    Tensors outputs;
  };
  // `values` is empty unless save() was called; `data` is the node's. A rule has no state of its own, since
  // compiled autograd runs one rule for many nodes.
  using Rule = Tensors (*)(const Tensors& gradients, const Values& values, const Data& data);

  // `op` as in messages, which lives for ever: "all_reduce_coalesced".
  RuleNode(const char* op, Rule rule, Data data) : op_(op), rule_(rule), data_(std::move(data)) {}

  // Saves the values on which the rule depends. To be called when this node is the outputs' history.
  void save(const Tensors& inputs, const Tensors& outputs);

  Tensors apply(Tensors&& gradients) override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  Tensors apply_with_saved(const Tensors& gradients,
                           torch::dynamo::autograd::SwapSavedVariables& saved) override;
  void release_variables() override;
  std::string name() const override { return std::string("funcol::") + op_; }

 private:
  std::vector<torch::autograd::VariableInfo> output_infos() const;
  void check_not_released() const;

  std::mutex mutex_;
  const char* op_;
  Rule rule_;
  Data data_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<torch::autograd::SavedVariable> outputs_;
  Text module_ = current_module();
  bool is_released_ = false;
};

}  // namespace funcol::autograd
