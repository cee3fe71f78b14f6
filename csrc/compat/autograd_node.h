// Nodes of autograd: how they are owned, by std::shared_ptr in older PyTorch releases, by intrusive_ptr in
// newer ones; and how compiled autograd calls them.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace funcol::compat {

// Makes a T, which derives from torch::autograd::Node, in the pointer that set_history() takes.
template <typename T, typename... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, torch::autograd::Node>) {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  } else {
    // Argument-dependent lookup finds deleteNode(), which newer PyTorch releases do not declare.
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](T* node) { deleteNode(node); });
  }
}

// Makes compiled autograd call `function(gradients, packed)` in place of `node`, and returns the placeholders
// of the results. `types` are the types of the packed values. Compiled autograd traces through a traceable
// function; others are opaque.
inline torch::autograd::variable_list call_when_compiled(
    const torch::autograd::Node& node, torch::dynamo::autograd::SwapSavedVariables& saved,
    const torch::autograd::variable_list& gradients, const std::vector<c10::IValue>& packed,
    const std::vector<at::TypePtr>& types, bool is_traceable,
    std::function<torch::autograd::variable_list(const torch::autograd::variable_list&,
                                                 const std::vector<c10::IValue>&)>
        function) {
  namespace compiled = torch::dynamo::autograd;
  const auto& compiler = compiled::getPyCompilerInterface();
  const auto bound = compiler->bind_function(saved.get_py_compiler(), node.name(), std::move(function), types,
                                             /*is_custom_function=*/true, is_traceable);
  return compiler->call_function(
      saved.get_py_compiler(), "apply_functional", bound, gradients, packed,
      compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
          compiled::get_input_metadata(node.next_edges())));
}

}  // namespace funcol::compat
