// The implementations of the functions of libfuncol_cuda.so (kernels/cuda_library.h).
#pragma once

#include "kernels/cuda_library.h"

namespace funcol::kernels::cuda {

const char* merge_shards(const void* in, void* out, const ShardShape& shape, void* stream);
const char* split_shards(const void* in, void* out, const ShardShape& shape, void* stream);
const char* copy_boxes(const RowBox* boxes, size_t num_boxes, void* stream);
template <typename T>
const char* fill_random(T* out, const RandomNumbers& numbers, const int64_t* seed, const RandomBox& box,
                        void* stream);

}  // namespace funcol::kernels::cuda
