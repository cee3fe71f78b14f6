// A node of autograd for collectives with several inputs or outputs, or with outputs of the caller.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace funcol::autograd {

// The gradients of all inputs from those of all outputs, by a rule that may want to see both.
//
// Differentiable again, as the rule is. An output that nobody used counts as one whose gradient is zeros,
// since ranks must agree on what they send.
class RuleNode final : public torch::autograd::Node {
 public:
  using Tensors = torch::autograd::variable_list;
  struct Values {
    Tensors inputs;
    Tensors outputs;
  };
  // `values` is empty unless they were saved.
  using Rule = std::function<Tensors(const Tensors& gradients, const Values& values)>;

  // `op` as in messages, which lives for ever: "all_reduce_coalesced".
  RuleNode(const char* op, Rule rule) : op_(op), rule_(std::move(rule)) {}

  // For a rule that depends on them. To be called when the outputs have this node as their history.
  void save(const Tensors& inputs, const Tensors& outputs);

  Tensors apply(Tensors&& gradients) override;
  void release_variables() override;
  std::string name() const override { return std::string("funcol::") + op_; }

 private:
  std::mutex mutex_;
  const char* op_;
  Rule rule_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  std::vector<torch::autograd::SavedVariable> outputs_;
};

}  // namespace funcol::autograd
