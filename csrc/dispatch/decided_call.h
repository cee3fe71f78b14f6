// Decisions about calls of operators: made in C++ where C++ can, else by the propagator in Python.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "dispatch/call_key.h"
#include "dispatch/fast_dispatch.h"

namespace funcol::python {

struct DecidedCall {
  // The DTensorSpecs that tensors have to get, by the tensors' numbers in the call.
  std::vector<std::pair<size_t, py::object>> inputs = {};
  // Places of arguments, and values to give the operator there.
  std::vector<std::pair<size_t, c10::IValue>> replaced = {};
  // The spec of the result, a tuple of those of several results, or None: as in OutputSharding.
  py::object output = {};
  // PyTorch's error if the operator has no result for these shapes; then there is no decision.
  py::object error = {};
};

// Decides a call of an operator. Returns nullopt if PyTorch's dispatcher has to run the call. Raises errors
// of the propagator.
std::optional<DecidedCall> decide_call(const NativeOperators& parts, const Call& call,
                                       const torch::jit::Stack& stack);

}  // namespace funcol::python
