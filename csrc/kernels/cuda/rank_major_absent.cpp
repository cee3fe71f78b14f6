#include "kernels/rank_major.h"

namespace funcol::kernels {
namespace {

constexpr const char* kAbsent =
    "this build of funcol has no CUDA kernels; build it again where the CUDA toolkit (nvcc) is found";

}  // namespace

const char* merge_shards_cuda(const void* /*in*/, void* /*out*/, const ShardShape& /*shape*/,
                              void* /*stream*/) {
  return kAbsent;
}

const char* split_shards_cuda(const void* /*in*/, void* /*out*/, const ShardShape& /*shape*/,
                              void* /*stream*/) {
  return kAbsent;
}

bool has_cuda_kernels() { return false; }

}  // namespace funcol::kernels
