// DTensor operators that run in C++ before PyTorch's Python fallback is reached.
//
// PyTorch's dispatcher passes each operator on a DTensor to the table of its Python interpreter. A table in
// front of it handles calls with remembered decisions: calls on exact DTensors, while no mode, transform or
// tracer is active. Each decision is queried from the propagator once. All other calls fall back to PyTorch's
// own table, unchanged.
//
// Everything here needs the GIL.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <memory>

#include "dispatch/call_key.h"
#include "sharding/sharding_engine.h"

namespace funcol::python {

// The keys that PyTorch's fallback excludes when it passes an operator to Python: autograd and all before it.
inline constexpr auto kBeforePython =
    c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^
    (c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) |
     c10::DispatchKeySet(c10::DispatchKey::Python));

struct NativeOperators {
  py::object dispatcher;  // DTensor's OpDispatcher
  py::object propagator;  // the fast path is active while the dispatcher has this one
  py::object logger;      // the fast path is active while it has no handlers: PyTorch logs each decision
  py::set copies;     // writes take the fast path while it is empty: see funcol.installation.view_writeback
  py::object decide;  // decide(op, args, kwargs) -> OutputSharding, or the error of wrong shapes
  py::object draw;    // draw(op, spec, args, kwargs) -> results of an operator that draws random numbers
  py::object
      default_handler;  // the handler that PyTorch's path uses for operators that the fast path runs itself
  py::object is_unmodified;  // is_unmodified() -> whether the dispatcher's methods are PyTorch's or funcol's,
                             // after changes
  py::object query_rule;     // query_rule(op, args, kwargs, index) -> the rule of a call, for UpstreamRules
  py::object forget_upstream_decisions;  // forget_upstream_decisions(): empties PyTorch's table
  ShardingEngine* engine = nullptr;      // the propagator's
  UpstreamRules* rules = nullptr;        // the propagator's; null if Python decides all calls
};

// Runs DTensor operators in C++ until remove_native_operators(). A second call replaces the first.
void install_native_operators(NativeOperators parts);
void remove_native_operators();
bool has_native_operators();

// Returns the description of an operator whose calls may take the fast path; null while the program has
// replaced parts of the dispatcher, logs decisions, or has a handler for the operator.
DescribedPtr supported_operator(const c10::OperatorHandle& op);
// Returns true if the dispatcher now has a handler, of PyTorch or of the program, for one of `ops`.
bool has_handler(at::ArrayRef<DescribedPtr> ops);

// Returns {operator: {"served": count, reason: count, ...}} since the last forget_operator_counts().
py::dict operator_counts();
void forget_operator_counts();

// Forgets all decisions.
void forget_call_plans();

// Empties PyTorch's table of decisions before the next call that falls back to PyTorch on this thread. A call
// on the stack may hold a pointer into the table, so it cannot be emptied at once.
void forget_upstream_decisions_later();

}  // namespace funcol::python
