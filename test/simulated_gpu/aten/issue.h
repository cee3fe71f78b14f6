// How operators become work of the current stream.
//
// Operations are numbered in the order in which the process issues them; a number ends the name of each,
// "aten::add#12". The environment says what else is done with them:
//   SIMULATED_GPU_NAN=1     an operation that reads NaN is reported: poison is NaN, so uninitialized memory
//   shows SIMULATED_GPU_BREAK=12  operation 12 fails in its caller, so that Python's traceback shows it
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "simulated_gpu.h"

namespace simulated_gpu::aten {

// CUDA tensors that an operation uses; others may be among them and say nothing.
struct Tensors {
  std::vector<at::Tensor> read = {};
  std::vector<at::Tensor> updated = {};  // read and written
  std::vector<at::Tensor> written = {};
  std::vector<Range> numbers = {};  // read, and no tensors: the state of a random generator
};

// Enqueues `run` on the current stream of the current device. `run` uses CPU tensors, without autograd. An
// error of what CUDA says about the launch is thrown; one of `run` is the device's, as that of a kernel.
// `amount` needs no bytes.
void issue(const std::string& name, const Tensors& tensors, std::function<void()> run, Amount amount = {});

}  // namespace simulated_gpu::aten
