#include "ops/gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <utility>

#include "async/dispatch_modes.h"
#include "compat/autograd_node.h"

namespace funcol::autograd {

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

}  // namespace funcol::autograd
