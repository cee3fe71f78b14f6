// Tensors among the boxed arguments of an operator, in lists, tuples and dicts too.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

namespace funcol {

// Returns the arguments of a call of `op`, which lie on top of the stack.
inline c10::ArrayRef<c10::IValue> arguments_of(const c10::OperatorHandle& op,
                                               const torch::jit::Stack& stack) {
  return torch::jit::last(stack, op.schema().arguments().size());
}

template <typename Visit>
void visit_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      visit_tensors(element, visit);
    }
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      visit_tensors(element, visit);
    }
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      visit_tensors(entry.key(), visit);
      visit_tensors(entry.value(), visit);
    }
  }
}

// Returns `value` with each tensor replaced, in nested lists too.
template <typename Replace>
c10::IValue replace_tensors(const c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) {
    return replace(value.toTensor());
  }
  if (!value.isList()) {
    return value;
  }
  const auto old_elements = value.toList();
  c10::impl::GenericList elements(old_elements.elementType());
  elements.reserve(old_elements.size());
  for (const c10::IValue& element : value.toListRef()) {
    elements.push_back(replace_tensors(element, replace));
  }
  return elements;
}

}  // namespace funcol
