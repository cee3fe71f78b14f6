// Arguments of operators as words of a key.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <variant>

#include "layout/word_key.h"
#include "propagation/op_call.h"

namespace funcol {

// Adds the value of a number or a bool. Adds nothing for another argument.
inline void add_number(WordKey& key, const Argument& argument) {
  if (const auto* const integer = std::get_if<int64_t>(&argument.value)) {
    key.add(static_cast<uint64_t>(*integer));
  } else if (const auto* const number = std::get_if<double>(&argument.value)) {
    key.add(std::bit_cast<uint64_t>(*number));
  } else if (const auto* const flag = std::get_if<bool>(&argument.value)) {
    key.add(*flag ? 1 : 0);
  }
}

// Adds an argument's type and value. add_leaf(argument) adds what counts of a tensor, a number or a bool.
template <typename AddLeaf>
void add_argument(WordKey& key, const Argument& argument, const AddLeaf& add_leaf) {
  key.add(argument.value.index());
  if (argument.is_list()) {
    key.add(argument.list().size());
    for (const auto& element : argument.list()) {
      add_argument(key, element, add_leaf);
    }
  } else if (const auto* const dtype = std::get_if<Dtype>(&argument.value)) {
    key.add(static_cast<uint64_t>(*dtype));
  } else if (const auto* const text = std::get_if<std::string>(&argument.value)) {
    add_text(key.words, *text);
  } else if (!argument.is_none()) {
    add_leaf(argument);
  }
}

}  // namespace funcol
