#include "flops.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <optional>

namespace simulated_gpu::aten {
namespace {

// The argument that is the left factor; the right one follows it.
std::optional<size_t> left_factor(const std::string& name) {
  if (name == "aten::mm" || name == "aten::bmm") {
    return 0;
  }
  if (name == "aten::addmm" || name == "aten::baddbmm") {
    return 1;
  }
  return std::nullopt;
}

}  // namespace

void add_flops(const std::string& name, const torch::jit::Stack& arguments, Amount& amount) {
  const std::optional<size_t> left = left_factor(name);
  if (!left) {
    return;
  }
  const at::Tensor& factor = arguments[*left].toTensor();
  amount.flops += 2 * factor.numel() * arguments[*left + 1].toTensor().size(-1);
  amount.type = c10::toString(factor.scalar_type());
}

bool multiplies_two_dtypes(const std::string& name, const torch::jit::Stack& arguments) {
  const std::optional<size_t> left = left_factor(name);
  return left && arguments[*left].toTensor().scalar_type() != arguments[*left + 1].toTensor().scalar_type();
}

}  // namespace simulated_gpu::aten
