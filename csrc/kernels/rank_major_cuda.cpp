#include "kernels/cuda_library.h"
#include "kernels/rank_major.h"

namespace funcol::kernels {

const char* merge_shards_cuda(const void* in, void* out, const ShardShape& shape, void* stream) {
  const auto* const functions = cuda_library().functions;
  return functions != nullptr ? functions->merge_shards(in, out, shape, stream) : why_no_cuda_kernels();
}

const char* split_shards_cuda(const void* in, void* out, const ShardShape& shape, void* stream) {
  const auto* const functions = cuda_library().functions;
  return functions != nullptr ? functions->split_shards(in, out, shape, stream) : why_no_cuda_kernels();
}

bool has_cuda_kernels() { return cuda_library().functions != nullptr; }

const char* why_no_cuda_kernels() { return has_cuda_kernels() ? nullptr : cuda_library().error.c_str(); }

}  // namespace funcol::kernels
