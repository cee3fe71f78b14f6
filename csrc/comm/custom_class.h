// Objects of custom classes inside `Any` schema arguments.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>

namespace funcol {

// Returns the T in `value`, or null. Python passes the bare holder, TorchScript an object with the holder in
// its only slot.
template <typename T>
c10::intrusive_ptr<T> custom_class(const c10::IValue& value) {
  c10::intrusive_ptr<torch::CustomClassHolder> holder;
  if (value.isCapsule()) {
    holder = value.toCapsule();
  } else if (value.isCustomClass()) {
    holder = value.toObject()->getSlot(0).toCapsule();
  }
  // PyTorch's dynamic_intrusive_pointer_cast() never releases its reference to an object of another type.
  return c10::intrusive_ptr<T>::unsafe_reclaim_from_nonowning(dynamic_cast<T*>(holder.get()));
}

}  // namespace funcol
