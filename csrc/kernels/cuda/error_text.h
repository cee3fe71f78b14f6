// Errors of the CUDA runtime as text.
#pragma once

#include <cuda_runtime_api.h>

namespace funcol::kernels::cuda {

// Null for cudaSuccess. Who gets the text has the error: it is not left in the thread's last error, which
// PyTorch, whose runtime this is, would take for its own.
inline const char* error_text(cudaError_t error) {
  if (error == cudaSuccess) {
    return nullptr;
  }
  cudaGetLastError();
  return cudaGetErrorString(error);
}

}  // namespace funcol::kernels::cuda
