// The implementations of the functions of libfuncol_cuda.so (kernels/cuda_library.h), and errors of the CUDA
// runtime as text.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/cuda_library.h"

namespace funcol::kernels::cuda {

const char* merge_shards(const void* in, void* out, const ShardShape& shape, void* stream);
const char* split_shards(const void* in, void* out, const ShardShape& shape, void* stream);
const char* copy_boxes(const RowBox* boxes, size_t num_boxes, void* stream);
template <typename T>
const char* fill_random(T* out, const RandomNumbers& numbers, const int64_t* seed, const RandomBox& box,
                        void* stream);

// Returns the text of `error`, or null for cudaSuccess. Clears the thread's last error: PyTorch shares this
// runtime and would report the error as its own.
inline const char* error_text(cudaError_t error) {
  if (error == cudaSuccess) {
    return nullptr;
  }
  cudaGetLastError();
  return cudaGetErrorString(error);
}

}  // namespace funcol::kernels::cuda
