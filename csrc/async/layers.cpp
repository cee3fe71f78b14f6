#include "async/layers.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "compat/dispatch_keys.h"

namespace funcol {

namespace {

using Key = c10::DispatchKey;
constexpr c10::DispatchKeySet kLayers({Key::Python, Key::PythonDispatcher, Key::PreDispatch,
                                       Key::FuncTorchDynamicLayerFrontMode,
                                       Key::FuncTorchDynamicLayerBackMode, Key::Functionalize, Key::Tracer});

}  // namespace

bool has_active_layers() { return c10::impl::tls_local_dispatch_key_set().included_.has_any(kLayers); }

OutsideLayers::OutsideLayers() : guard_(kLayers.add(Key::PythonTLSSnapshot)) {}

bool belongs_to_layer(const at::Tensor& tensor) {
  static constexpr auto kKeys = c10::DispatchKeySet({Key::Python, Key::Functionalize, Key::FuncTorchBatched,
                                                     Key::FuncTorchGradWrapper}) |
                                compat::kFakeKeys;
  return tensor.key_set().has_any(kKeys);
}

}  // namespace funcol
