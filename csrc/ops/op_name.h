// Names of operators without their namespace.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <string_view>

namespace funcol {

// funcol::all_reduce -> all_reduce
inline std::string unqualified_name(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return name.substr(name.find("::") + 2);
}

// "all_reduce(Tensor input, ...) -> Tensor" -> all_reduce
inline std::string name_in_schema(std::string_view schema) {
  return std::string(schema.substr(0, schema.find('(')));
}

}  // namespace funcol
