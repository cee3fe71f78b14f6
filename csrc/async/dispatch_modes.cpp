#include "async/dispatch_modes.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>

#include "compat/missing_operators.h"

namespace funcol {

namespace {

using Key = c10::DispatchKey;

constexpr c10::DispatchKeySet kTransforms({Key::FuncTorchDynamicLayerFrontMode,
                                           Key::FuncTorchDynamicLayerBackMode});
constexpr c10::DispatchKeySet kLayers =
    kTransforms | c10::DispatchKeySet({Key::Python, Key::PythonDispatcher, Key::PreDispatch,
                                       Key::Functionalize, Key::Tracer});

bool is_included(c10::DispatchKeySet keys) {
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(keys);
}

std::atomic<bool> ops_are_replaced{false};

}  // namespace

void set_ops_are_replaced(bool are_replaced) {
  ops_are_replaced.store(are_replaced, std::memory_order_relaxed);
}

bool has_watching_layers() { return is_included(kLayers); }

bool has_active_layers() { return is_included(kLayers) || ops_are_replaced.load(std::memory_order_relaxed); }

bool has_active_transforms() { return is_included(kTransforms); }

OutsideLayers::OutsideLayers() : guard_(kLayers.add(Key::PythonTLSSnapshot)) {}

bool belongs_to_layer(const at::Tensor& tensor) {
  static constexpr auto kKeys = c10::DispatchKeySet({Key::Python, Key::Functionalize, Key::FuncTorchBatched,
                                                     Key::FuncTorchGradWrapper}) |
                                compat::kFakeKeys;
  return tensor.key_set().has_any(kKeys);
}

}  // namespace funcol
