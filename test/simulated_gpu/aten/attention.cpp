#include "attention.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>

namespace simulated_gpu::aten {
namespace {

using torch::jit::Stack;

// The efficient operator's logsumexp has rows of a multiple of this.
constexpr int64_t kRows = 32;

void refuse_dropout(double probability) {
  TORCH_CHECK(probability == 0, "simulated GPU: fused attention has no dropout; got ", probability);
}

std::optional<double> scale_of(const c10::IValue& argument) { return argument.toOptional<double>(); }

std::optional<at::Tensor> bias_of(const c10::IValue& argument) {
  return argument.isTensor() && argument.toTensor().defined() ? std::optional(argument.toTensor())
                                                              : std::nullopt;
}

at::Tensor no_seed(at::IntArrayRef sizes) { return at::zeros(sizes, at::kLong); }

}  // namespace

// (query, key, value, dropout_p, is_causal, return_debug_mask, *, scale) -> (output, logsumexp, cum_seq_q,
// cum_seq_k, max_q, max_k, rng_state, unused, debug_attn_mask)
Stack flash_attention(Stack arguments, const at::Generator& /*generator*/) {
  const at::Tensor query = arguments[0].toTensor(), key = arguments[1].toTensor();
  refuse_dropout(arguments[3].toDouble());
  TORCH_CHECK(!arguments[5].toBool(), "simulated GPU: fused attention returns no debug mask");
  auto [output, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(query, key, arguments[2].toTensor(), /*dropout_p=*/0,
                                                      arguments[4].toBool(), {}, scale_of(arguments[6]));
  return {output,       logsumexp,     at::Tensor(),
          at::Tensor(), query.size(2), key.size(2),
          no_seed({2}), no_seed({}),   at::empty({0}, query.options())};
}

// (grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
// philox_seed, philox_offset, *, scale) -> (grad_query, grad_key, grad_value)
Stack flash_attention_backward(Stack arguments, const at::Generator& /*generator*/) {
  const auto tensor = [&](size_t argument) { return arguments[argument].toTensor(); };
  refuse_dropout(arguments[10].toDouble());
  auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      tensor(0), tensor(1), tensor(2), tensor(3), tensor(4), tensor(5), /*dropout_p=*/0,
      arguments[11].toBool(), {}, scale_of(arguments[14]));
  return {query, key, value};
}

// (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, *, scale) -> (output, logsumexp,
// philox_seed, philox_offset)
Stack efficient_attention(Stack arguments, const at::Generator& /*generator*/) {
  const at::Tensor query = arguments[0].toTensor();
  refuse_dropout(arguments[5].toDouble());
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, arguments[1].toTensor(), arguments[2].toTensor(), /*dropout_p=*/0, arguments[6].toBool(),
      bias_of(arguments[3]), scale_of(arguments[7]));
  const int64_t num_rows = query.size(2);
  const int64_t padding = (kRows - num_rows % kRows) % kRows;
  logsumexp = arguments[4].toBool() ? at::constant_pad_nd(logsumexp, {0, padding})
                                    : logsumexp.new_empty({query.size(0), query.size(1), 0});
  return {output, logsumexp, no_seed({}), no_seed({})};
}

// (grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
// grad_input_mask, is_causal, *, scale) -> (grad_query, grad_key, grad_value, grad_attn_bias)
Stack efficient_attention_backward(Stack arguments, const at::Generator& /*generator*/) {
  const auto tensor = [&](size_t argument) { return arguments[argument].toTensor(); };
  refuse_dropout(arguments[9].toDouble());
  TORCH_CHECK(!arguments[10].toBoolList().get(3), "simulated GPU: fused attention has no gradient of a bias");
  auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      tensor(0), tensor(1), tensor(2), tensor(3), tensor(5),
      tensor(6).narrow(2, 0, tensor(1).size(2)).contiguous(), /*dropout_p=*/0, arguments[11].toBool(),
      bias_of(arguments[4]), scale_of(arguments[12]));
  return {query, key, value, at::Tensor()};
}

}  // namespace simulated_gpu::aten
