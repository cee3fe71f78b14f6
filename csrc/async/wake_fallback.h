// The fallback of the wake key, and how it treats an operator; see wake_fallback.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "async/wake_key.h"

namespace funcol {

inline constexpr c10::DispatchKeySet kKeysBelowWake{c10::DispatchKeySet::FULL_AFTER, kWakeKey};

enum class OperatorKind : uint8_t {
  kComposite,  // made of other operators: passes through
  kView,       // its results alias its argument and nothing is written: stays pending
  kReader,     // may look at the data: waits
};

// Classifies reshape as kComposite; view, transpose.int, split.Tensor as kView; add.Tensor, add_.Tensor, item
// as kReader.
OperatorKind classify(const c10::OperatorHandle& op);

// Handles `op` at the wake key: the fallback's boxed kernel.
void wake(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Waits for an argument, which may be undefined, of an operator of kind kReader.
void settle_for_reader(const at::Tensor& tensor);

// Registers the unboxed kernels at the wake key for the operators that programs most often use first on a
// result. They do what the fallback does, whose boxed arguments cost more than waiting for data that has
// arrived. Called once, where the fallback is registered (wake_kernels.cpp).
void add_wake_kernels();

}  // namespace funcol
