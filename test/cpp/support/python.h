// Python objects, written as Python, for tests of the rooms that work with them.
//
// The program has one interpreter, whose GIL the tests hold. It is rank 3 of 4 on PyTorch's `fake` backend.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace funcol::test {

// The value of an expression of the names in python_side.py.
py::object python(const char* expression);

// The value of an expression in which `x` is an object of the test.
py::object python(const char* expression, py::handle x);

// The number of times C++ has called a function that Python registered.
int64_t num_calls(const char* callback);

}  // namespace funcol::test
