// How an autograd node is owned: by std::shared_ptr in older PyTorch minors, by intrusive_ptr in newer ones.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace funcol::compat {

// A new T, a torch::autograd::Node, as set_history() takes it.
template <typename T, typename... Args>
auto make_node(Args&&... args) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, torch::autograd::Node>) {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  } else {
    // Found by the type of its argument, since newer minors do not have it.
    return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](T* node) { deleteNode(node); });
  }
}

}  // namespace funcol::compat
