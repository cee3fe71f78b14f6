// The implementation of fill_random_cuda() (kernels/random.h).
#pragma once

#include "kernels/random.h"

namespace funcol::kernels::cuda {

template <typename T>
const char* fill_random(T* out, const RandomNumbers& numbers, const int64_t* seed, const RandomBox& box,
                        void* stream);

}  // namespace funcol::kernels::cuda
