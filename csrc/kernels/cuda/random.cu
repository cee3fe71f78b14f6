#include "kernels/cuda/fill_random.h"
#include "kernels/cuda/functions.h"
#include "kernels/cuda/launch.h"

namespace funcol::kernels::cuda {

template <typename T>
const char* fill_random(T* out, const RandomNumbers& numbers, const int64_t* seed, const RandomBox& box,
                        void* stream) {
  if (box.numel() == 0) {
    return nullptr;
  }
  return launch(FillRandom<T>(out, numbers, seed, box), static_cast<cudaStream_t>(stream));
}

template const char* fill_random(float*, const RandomNumbers&, const int64_t*, const RandomBox&, void*);
template const char* fill_random(double*, const RandomNumbers&, const int64_t*, const RandomBox&, void*);
template const char* fill_random(int64_t*, const RandomNumbers&, const int64_t*, const RandomBox&, void*);
template const char* fill_random(bool*, const RandomNumbers&, const int64_t*, const RandomBox&, void*);

}  // namespace funcol::kernels::cuda
