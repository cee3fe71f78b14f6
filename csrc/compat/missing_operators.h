// Operators and dispatch keys that only newer PyTorch minors have.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include <string>
#include <string_view>

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

// Defines the operator of `schema` in _c10d_functional if PyTorch has none. The kernel of `make_kernel()`
// serves all devices, `meta` the Meta device.
template <typename MakeKernel, typename Meta>
void define_if_missing(torch::Library& library, const char* schema, const MakeKernel& make_kernel,
                       Meta* meta) {
  const std::string_view text(schema);
  const std::string name(text.substr(0, text.find('(')));
  if (!has_operator("_c10d_functional::" + name)) {
    library.def(schema, {at::Tag::pt2_compliant_tag});
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, make_kernel()));
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Meta, torch::CppFunction(meta)));
  }
}

}  // namespace funcol::compat
