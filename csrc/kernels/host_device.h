// FUNCOL_HOST_DEVICE marks functions that run on the host and in CUDA kernels; host compilers do not see it.
#pragma once

#ifdef __CUDACC__
#define FUNCOL_HOST_DEVICE __host__ __device__
#else
#define FUNCOL_HOST_DEVICE
#endif
