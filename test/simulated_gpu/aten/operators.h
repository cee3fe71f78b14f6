// Uses that calls of an operator make of their arguments, read from its schema.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

namespace simulated_gpu::aten {

// A kernel that runs in place of the CPU's: arguments on the CPU to results on the CPU. Random numbers come
// from the generator, so that they follow the CUDA generator's seed.
using HostKernel =
    std::function<torch::jit::Stack(torch::jit::Stack arguments, const at::Generator& generator)>;

// Arguments and results are known by their indices in the schema.
//
//   aten::add.out(Tensor self, Tensor other, *, Scalar alpha=1, Tensor(a!) out) -> Tensor(a!)
//     outs {3}, updated {}, argument_of_result {3}
//   aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)
//     outs {}, updated {0}, argument_of_result {0}
struct Operator {
  size_t num_arguments = 0;
  std::vector<size_t> outs;        // written and never read
  std::vector<size_t> updated;     // read and written
  std::vector<size_t> generators;  // random number generators, mostly one that may be None
  std::vector<std::optional<size_t>>
      argument_of_result;           // the argument that the result is; none: a new tensor
  bool has_numbers = false;         // some results are not tensors, so the host waits for them
  bool takes_host_tensors = false;  // CPU tensors of any size may stand beside CUDA tensors
  bool computes_in_float = false;   // the CPU gets 16-bit tensors as float
  bool draws = false;               // random numbers, from no generator of its arguments
  HostKernel host_kernel = nullptr;

  bool has_new_results() const;
  bool is_random() const { return !generators.empty() || draws; }
  bool is_out(size_t argument) const;
  bool is_updated(size_t argument) const;
};

Operator describe(const c10::FunctionSchema& schema);

// Returns true if the simulated GPU computes an operator that both the CPU and CUDA have kernels for. Others
// keep PyTorch's CUDA code: views, allocation, operators made of memcpy and cudaStreamSynchronize, and
// kernels of libraries.
bool is_simulated(const c10::FunctionSchema& schema);

}  // namespace simulated_gpu::aten
