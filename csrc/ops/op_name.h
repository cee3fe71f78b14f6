// Names of operators without their namespace.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

namespace funcol {

// funcol::all_reduce -> all_reduce
inline std::string unqualified_name(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return name.substr(name.find("::") + 2);
}

}  // namespace funcol
