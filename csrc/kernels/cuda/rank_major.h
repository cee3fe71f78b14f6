// The CUDA functions behind merge_shards_cuda() and split_shards_cuda() (kernels/rank_major.h).
#pragma once

#include "kernels/rank_major.h"

namespace funcol::kernels::cuda {

const char* merge_shards(const void* in, void* out, const ShardShape& shape, void* stream);
const char* split_shards(const void* in, void* out, const ShardShape& shape, void* stream);

}  // namespace funcol::kernels::cuda
