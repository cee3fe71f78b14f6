#include "ops/rule_node.h"

namespace funcol::autograd {

void RuleNode::save(const Tensors& inputs, const Tensors& outputs) {
  for (const auto& input : inputs) {
    inputs_.emplace_back(input, /*is_output=*/false);
  }
  for (const auto& output : outputs) {
    outputs_.emplace_back(output, /*is_output=*/true);
  }
}

RuleNode::Tensors RuleNode::apply(Tensors&& gradients) {
  Values values;
  Rule rule;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(rule_ != nullptr, name(),
                ": trying to backward through the graph a second time. Pass retain_graph=True the first "
                "time.");
    rule = rule_;
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
  return rule(gradients, values);
}

void RuleNode::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!inputs_.empty()) {
    rule_ = nullptr;
  }
  inputs_.clear();
  outputs_.clear();
}

}  // namespace funcol::autograd
