// Decisions that C++ makes for calls of operators, without PyTorch's objects in between.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>

#include "dispatch/call_key.h"
#include "dispatch/fast_dispatch.h"
#include "pyobjects/op_schemas.h"
#include "sharding/sharding_engine.h"

namespace funcol::python {

// A call and the decision for it.
struct DecidedCall {
  PythonSchema schema;
  CallDecision decision;
};

// Decides a call by PyTorch's rule, in C++. Returns nullopt where Python has to decide, or has an error to
// raise.
std::optional<DecidedCall> decide_call(const NativeOperators& parts, const c10::OperatorHandle& op,
                                       const DescribedOperator& described, const torch::jit::Stack& stack,
                                       const Call& call);

}  // namespace funcol::python
