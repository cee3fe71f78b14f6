// Random numbers of simulated kernels.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/cuda/PhiloxCudaState.h>

#include <optional>
#include <vector>

#include "simulated_gpu.h"

namespace simulated_gpu::aten {

// The random numbers of one kernel: other numbers than a GPU's, but as there a function of the CUDA
// generator's seed and offset alone. In a graph both lie in device memory, where each replay finds new ones.
class RandomState {
 public:
  // Draws nothing.
  RandomState() = default;

  // Takes its share of the generator, or of the current device's default one, which advances.
  static RandomState draw(const std::optional<at::Generator>& generator);

  // A CPU generator with these numbers; undefined if nothing was drawn. Only for work that runs.
  at::Generator cpu_generator() const;

  // The device memory that cpu_generator() reads.
  std::vector<Range> reads() const;

 private:
  std::optional<at::PhiloxCudaState> state_;
};

}  // namespace simulated_gpu::aten
