#include "operators.h"

#include <algorithm>
#include <string>
#include <string_view>

namespace simulated_gpu::aten {
namespace {

template <typename Names>
bool starts_with_any(std::string_view name, const Names& beginnings) {
  constexpr std::string_view kNamespace = "aten::";
  if (!name.starts_with(kNamespace)) {
    return false;
  }
  name.remove_prefix(kNamespace.size());
  return std::any_of(std::begin(beginnings), std::end(beginnings),
                     [&](std::string_view beginning) { return name.starts_with(beginning); });
}

bool contains(const std::vector<size_t>& indices, size_t index) {
  return std::ranges::find(indices, index) != indices.end();
}

bool is_written(const c10::AliasInfo* alias) { return alias != nullptr && alias->isWrite(); }

std::optional<size_t> argument_of(const c10::Argument& result, const c10::FunctionSchema& schema) {
  if (!is_written(result.alias_info())) {
    return std::nullopt;
  }
  for (size_t a = 0; a < schema.arguments().size(); ++a) {
    const c10::AliasInfo* const alias = schema.arguments()[a].alias_info();
    if (is_written(alias) && *alias == *result.alias_info()) {
      return a;
    }
  }
  return std::nullopt;
}

// PyTorch's CUDA kernels of these accept CPU tensors that are more than numbers: indices, lists of scalars.
bool takes_host_tensors(std::string_view name) {
  constexpr std::string_view kBeginnings[] = {"index",        "_index_put", "_unsafe_index",
                                              "_foreach",     "_fused",     "bernoulli",
                                              "_amp_foreach", "_ctc_loss",  "_use_cudnn_ctc"};
  return starts_with_any(name, kBeginnings);
}

// On CUDA these keep statistics in float beside 16-bit tensors, on the CPU in the tensors' own type.
bool computes_in_float(std::string_view name) {
  constexpr std::string_view kBeginnings[] = {"native_layer_norm", "native_group_norm"};
  return starts_with_any(name, kBeginnings);
}

}  // namespace

bool Operator::has_new_results() const {
  return std::ranges::any_of(argument_of_result, [](const auto& argument) { return !argument.has_value(); });
}

bool Operator::is_out(size_t argument) const { return contains(outs, argument); }

bool Operator::is_updated(size_t argument) const { return contains(updated, argument); }

Operator describe(const c10::FunctionSchema& schema) {
  Operator op;
  op.num_arguments = schema.arguments().size();
  for (size_t a = 0; a < op.num_arguments; ++a) {
    const c10::Argument& argument = schema.arguments()[a];
    if (is_written(argument.alias_info())) {
      (argument.kwarg_only() ? op.outs : op.updated).push_back(a);
    }
    if (argument.type()->str().starts_with("Generator")) {
      op.generators.push_back(a);
    }
  }
  if (schema.name() == "aten::native_batch_norm" && schema.overload_name().empty()) {
    op.updated = {3, 4};  // running_mean, running_var: the schema does not say so
  }
  for (const c10::Argument& result : schema.returns()) {
    op.argument_of_result.push_back(argument_of(result, schema));
    op.has_numbers |= result.type()->str().find("Tensor") == std::string::npos;
  }
  op.takes_host_tensors = takes_host_tensors(schema.name());
  op.computes_in_float = computes_in_float(schema.name()) && op.outs.empty();
  return op;
}

bool is_simulated(const c10::FunctionSchema& schema) {
  constexpr std::string_view kOthers[] = {
      // allocation and metadata
      "empty", "_empty", "as_strided", "view", "_reshape", "resize", "_resize_output", "set_",
      "record_stream", "is_set_to", "is_pinned", "_pin_memory", "_lazy_clone", "alias", "lift", "detach",
      "_efficientzerotensor",
      // memcpy, then cudaStreamSynchronize
      "_local_scalar_dense",
      // other layouts and quantized tensors
      "_sparse", "_to_sparse", "_nested", "quantize_per",
      // libraries and fused kernels, which PyTorch uses only where they are switched on
      "cudnn", "_cudnn", "miopen", "_cslt", "_triton", "_thnn", "_flash", "_efficient_att",
      "_scaled_dot_product", "_fused_sdp_choice"};
  const auto is_view = [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  };
  return std::none_of(schema.returns().begin(), schema.returns().end(), is_view) &&
         !starts_with_any(schema.name(), kOthers);
}

}  // namespace simulated_gpu::aten
