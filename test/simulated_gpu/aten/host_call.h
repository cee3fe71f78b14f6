// A call of an operator on the CPU, in the work of a stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <memory>

#include "operators.h"
#include "random.h"

namespace simulated_gpu::aten {

// May be called many times, as a graph does.
class HostCall {
 public:
  // `arguments` are on the CPU; what they write is the call's effect.
  HostCall(c10::OperatorHandle handle, std::shared_ptr<const Operator> op, torch::jit::Stack arguments,
           RandomState random);

  // The results, in memory of their own except those that are arguments.
  torch::jit::Stack run() const;

  // Runs, and copies new results to `results`, CPU tensors over the caller's memory; those that are None or
  // undefined are dropped. An error where the CPU's kernel and Meta's disagree on sizes.
  void run_into(const torch::jit::Stack& results) const;

 private:
  c10::OperatorHandle handle_;
  std::shared_ptr<const Operator> op_;
  torch::jit::Stack arguments_;
  RandomState random_;
};

}  // namespace simulated_gpu::aten
