// Objects of custom classes inside `Any` schema arguments.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>

namespace funcol {

// The T in `value`, or null. Python passes the bare holder, TorchScript an object with the holder in its only
// slot.
template <typename T>
c10::intrusive_ptr<T> custom_class(const c10::IValue& value) {
  if (value.isCapsule()) {
    return c10::dynamic_intrusive_pointer_cast<T>(value.toCapsule());
  }
  if (value.isCustomClass()) {
    return c10::dynamic_intrusive_pointer_cast<T>(value.toObject()->getSlot(0).toCapsule());
  }
  return {};
}

}  // namespace funcol
