#include "sharding/decision_counts.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <map>
#include <unordered_map>

namespace funcol::python {
namespace {

// By operator, which is kept.
std::unordered_map<PyObject*, std::map<std::string, size_t>>& counts() {
  static auto* const counts = new std::unordered_map<PyObject*, std::map<std::string, size_t>>;  // NOLINT
  return *counts;
}

}  // namespace

void count_decision(py::handle op_overload, const std::string& reason) {
  const auto [entry, is_new] = counts().try_emplace(op_overload.ptr());
  if (is_new) {
    op_overload.inc_ref();
  }
  ++entry->second[reason];
}

py::dict decision_counts() {
  std::map<std::string, py::object> by_name;
  for (const auto& [op, reasons] : counts()) {
    by_name[py::str(py::handle(op))] = py::cast(reasons);
  }
  py::dict sorted;
  for (const auto& [name, reasons] : by_name) {
    sorted[py::str(name)] = reasons;
  }
  return sorted;
}

void forget_decision_counts() {
  for (const auto& [op, reasons] : counts()) {
    py::handle(op).dec_ref();
  }
  counts().clear();
}

}  // namespace funcol::python
