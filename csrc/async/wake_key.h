// The dispatch key that wakes a pending tensor.
//
// A tensor whose collective still runs carries this key above autograd, so that the first operator that
// reads it comes to us before anybody else. DeferredInit is unused in every supported PyTorch and sits
// above autograd, autocast and the Python key; this constant is the only place that names it.
#pragma once

#include <c10/core/DispatchKey.h>

namespace funcol {

inline constexpr c10::DispatchKey kWakeKey = c10::DispatchKey::DeferredInit;

// False if another library had registered a fallback for the key when this one was loaded. Pending
// tensors then carry no key: raw access to their storage still waits for the data, and so do views.
bool has_wake_key();

}  // namespace funcol
