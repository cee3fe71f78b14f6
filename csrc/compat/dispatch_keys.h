// Dispatch keys that only some PyTorch minors have.
#pragma once

#include <c10/core/DispatchKeySet.h>

namespace funcol::compat {

namespace detail {
template <typename Key>
constexpr c10::DispatchKeySet fake_keys() {
  if constexpr (requires { Key::Fake; }) {
    return c10::DispatchKeySet(Key::Fake);
  } else {
    return c10::DispatchKeySet();
  }
}
}  // namespace detail

// The key of fake tensors that are implemented in C++; empty where PyTorch has none.
inline constexpr c10::DispatchKeySet kFakeKeys = detail::fake_keys<c10::DispatchKey>();

}  // namespace funcol::compat
