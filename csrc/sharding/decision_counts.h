// How many sharding decisions C++ made, and why others were left to PyTorch.
//
// Everything here needs the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace funcol::python {

void count_decision(py::handle op_overload, const std::string& reason);

// {operator: {reason: count}}, sorted by operator, since the last forget_decision_counts().
py::dict decision_counts();
void forget_decision_counts();

}  // namespace funcol::python
