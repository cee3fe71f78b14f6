// Tensors among the boxed arguments of an operator, in lists, tuples and dicts too.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>

namespace funcol {

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
