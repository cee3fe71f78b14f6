#include "async/layers.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "compat/dispatch_keys.h"

namespace funcol {

bool has_active_layers() {
  using Key = c10::DispatchKey;
  static constexpr c10::DispatchKeySet kActive(
      {Key::Python, Key::PythonDispatcher, Key::PreDispatch, Key::FuncTorchDynamicLayerFrontMode,
       Key::FuncTorchDynamicLayerBackMode, Key::Functionalize, Key::Tracer});
  return c10::impl::tls_local_dispatch_key_set().included_.has_any(kActive);
}

bool belongs_to_layer(const at::Tensor& tensor) {
  using Key = c10::DispatchKey;
  static constexpr auto kKeys = c10::DispatchKeySet({Key::Python, Key::Functionalize, Key::FuncTorchBatched,
                                                     Key::FuncTorchGradWrapper}) |
                                compat::kFakeKeys;
  return tensor.key_set().has_any(kKeys);
}

}  // namespace funcol
