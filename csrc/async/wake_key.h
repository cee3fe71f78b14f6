// The dispatch key that wakes a pending tensor.
//
// A tensor whose collective still runs carries this key. The key sits above autograd, autocast and the Python
// key, so that the first operator that reads the tensor comes to funcol first. DeferredInit is unused in
// every supported PyTorch; this constant is the only place that names it.
#pragma once

#include <c10/core/DispatchKey.h>

namespace funcol {

inline constexpr c10::DispatchKey kWakeKey = c10::DispatchKey::DeferredInit;

// Returns false if another library had registered a fallback for the key when funcol was loaded. Pending
// tensors then carry no key: raw access to their storage, and views, still wait for the data.
bool has_wake_key();

}  // namespace funcol
