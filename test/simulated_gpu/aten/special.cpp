#include "special.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>

namespace simulated_gpu::aten {

// native_dropout(Tensor input, float p, bool? train) -> (Tensor, Tensor mask)
torch::jit::Stack dropout(torch::jit::Stack arguments, const at::Generator& generator) {
  const at::Tensor input = arguments[0].toTensor();
  const double probability = arguments[1].toDouble();
  const bool is_training = arguments[2].isNone() || arguments[2].toBool();

  const at::Tensor mask = at::ones(input.sizes(), input.options().dtype(at::kBool));
  if (!is_training) {
    return {input.clone(), mask};
  }
  mask.bernoulli_(1 - probability, generator);
  if (probability == 1) {
    return {at::zeros_like(input), mask};
  }
  return {input.mul(mask).mul(1 / (1 - probability)), mask};
}

}  // namespace simulated_gpu::aten
