#include "sharding/decision_counts.h"

#include <unordered_map>

#include "pyobjects/op_schemas.h"

namespace funcol::python {
namespace {

using Counts = std::map<std::string, size_t>;  // by reason

// By OpOverload, all of which outlive the counts.
std::unordered_map<PyObject*, Counts>& counts() {
  static std::unordered_map<PyObject*, Counts> counts;
  return counts;
}

}  // namespace

void count_decision(py::handle op_overload, const std::string& reason) {
  to_operator(op_overload);  // keeps the overload
  ++counts()[op_overload.ptr()][reason];
}

std::map<std::string, Counts> decision_counts() {
  std::map<std::string, Counts> by_name;
  for (const auto& [op, of_op] : counts()) {
    by_name[py::str(py::handle(op))] = of_op;
  }
  return by_name;
}

void forget_decision_counts() { counts().clear(); }

}  // namespace funcol::python
