#include "propagation/op_call.h"

#include <stdexcept>

namespace funcol {
namespace {

[[noreturn]] void refuse(const std::string& wanted) {
  throw std::invalid_argument("Argument: " + wanted + " was asked for, but the argument is something else.");
}

}  // namespace

size_t Argument::tensor() const {
  if (const auto* number = std::get_if<TensorNumber>(&value)) {
    return number->number;
  }
  refuse("a tensor");
}

bool Argument::boolean() const {
  if (const auto* truth = std::get_if<bool>(&value)) {
    return *truth;
  }
  refuse("a bool");
}

int64_t Argument::integer() const {
  if (const auto* number = std::get_if<int64_t>(&value)) {
    return *number;
  }
  refuse("an int");
}

double Argument::number() const {
  if (const auto* number = std::get_if<double>(&value)) {
    return *number;
  }
  if (const auto* number = std::get_if<int64_t>(&value)) {
    return static_cast<double>(*number);
  }
  refuse("a number");
}

std::vector<int64_t> Argument::integers() const {
  if (const auto* number = std::get_if<int64_t>(&value)) {
    return {*number};
  }
  std::vector<int64_t> numbers;
  for (const auto& item : list()) {
    numbers.push_back(item.integer());
  }
  return numbers;
}

const Argument::List& Argument::list() const {
  if (const auto* items = std::get_if<List>(&value)) {
    return *items;
  }
  refuse("a list");
}

const Argument& OpCall::arg(std::string_view name) const {
  for (const auto& [known, argument] : args) {
    if (known == name) {
      return argument;
    }
  }
  throw std::invalid_argument(op + ": there is no argument '" + std::string(name) + "'.");
}

bool OpCall::has_arg(std::string_view name) const {
  for (const auto& [known, argument] : args) {
    if (known == name) {
      return true;
    }
  }
  return false;
}

int64_t counted_from_0(const OpCall& call, int64_t dim, int64_t num_dims) {
  const int64_t dims = num_dims == 0 ? 1 : num_dims;
  if (dim < -dims || dim >= dims) {
    throw std::out_of_range(call.op + ": dim " + std::to_string(dim) + " is out of range for a tensor of " +
                            std::to_string(num_dims) + " dims. Pass a dim from " + std::to_string(-dims) +
                            " to " + std::to_string(dims - 1) + ".");
  }
  return dim < 0 ? dim + dims : dim;
}

}  // namespace funcol
