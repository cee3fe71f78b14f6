// Operators and dispatch keys that only newer PyTorch releases have.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include <string>

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

// Returns true if the running PyTorch defines the operator `name`, such as "aten::relu".
inline bool has_operator(const std::string& name) {
  return c10::Dispatcher::singleton().findSchema({name, ""}).has_value();
}

// Defines the operator `name` in _c10d_functional, with the schema of funcol's operator, if PyTorch does not
// define it. The kernel that `make_kernel()` returns handles all devices, `meta` the Meta device.
template <typename MakeKernel, typename Meta>
void define_if_missing(torch::Library& library, const std::string& name, const MakeKernel& make_kernel,
                       Meta* meta) {
  const auto qualified = "_c10d_functional::" + name;
  if (!has_operator(qualified)) {
    const auto own = c10::Dispatcher::singleton().findSchemaOrThrow(("funcol::" + name).c_str(), "");
    library.def(own.schema().cloneWithName(qualified, ""), {at::Tag::pt2_compliant_tag});
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, make_kernel()));
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Meta, torch::CppFunction(meta)));
  }
}

}  // namespace funcol::compat
