// How many sharding decisions C++ made, and why others were left to PyTorch.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <map>
#include <string>

namespace funcol::python {

void count_decision(py::handle op_overload, const std::string& reason);

// Returns {operator: {reason: count}} since the last forget_decision_counts().
std::map<std::string, std::map<std::string, size_t>> decision_counts();
void forget_decision_counts();

}  // namespace funcol::python
