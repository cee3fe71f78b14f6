// Tensors without data for the results of collectives: sizes, which may be symbols, dtypes and strides.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <vector>

#include "ops/backend_tensor.h"
#include "ops/parts.h"

namespace funcol {

// Returns a contiguous tensor of the dtype of `like`.
inline at::Tensor meta_of_sizes(const at::Tensor& like, c10::SymIntArrayRef sizes) {
  return at::empty_symint(sizes, like.options());
}

// Returns a contiguous tensor of the sizes and dtype of `input`.
inline at::Tensor meta_like(const at::Tensor& input) {
  return at::empty_like(input, input.options(), at::MemoryFormat::Contiguous);
}

// Returns `make_meta(input)` for each input.
template <typename MakeMeta>
std::vector<at::Tensor> meta_of_each(at::TensorList inputs, const MakeMeta& make_meta) {
  std::vector<at::Tensor> results;
  results.reserve(inputs.size());
  for (const auto& input : inputs) {
    results.push_back(make_meta(input));
  }
  return results;
}

// Returns the sizes of `input`; (1) for a 0-dim tensor.
inline SymSizes sizes_with_dims(const at::Tensor& input) {
  return input.dim() == 0 ? SymSizes{c10::SymInt(1)} : input.sym_sizes().vec();
}

// Returns this rank's part of `full` along `dim`. Checks the arguments, for operator `op`.
inline at::Tensor meta_of_own_part(const at::Tensor& full, int64_t dim, const c10d::ProcessGroup& group,
                                   at::OptionalSymIntArrayRef split_sizes, const char* op) {
  check_has_dims(full, op);
  dim = wrap_dim(dim, full, op);
  auto sizes = full.sym_sizes().vec();
  sizes[dim] = sizes_of_parts(sizes[dim], dim, split_sizes, group, op)[group.getRank()];
  return meta_of_sizes(full, sizes);
}

}  // namespace funcol
