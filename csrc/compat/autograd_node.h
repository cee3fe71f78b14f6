// How an autograd node is owned: by std::shared_ptr in older PyTorch minors, by intrusive_ptr in newer ones.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace funcol::compat {

// A new T, which derives from torch::autograd::Node, in the pointer that set_history() takes.
template <typename T, typename... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, torch::autograd::Node>) {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  } else {
    // Found by its argument's type: newer minors do not declare deleteNode().
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](T* node) { deleteNode(node); });
  }
}

}  // namespace funcol::compat
