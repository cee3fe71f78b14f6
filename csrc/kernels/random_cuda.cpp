#include <type_traits>

#include "kernels/cuda_library.h"
#include "kernels/random.h"
#include "kernels/rank_major.h"

namespace funcol::kernels {
namespace {

template <typename T>
CudaFunctions::FillRandom<T> function_of(const CudaFunctions& functions) {
  if constexpr (std::is_same_v<T, float>) {
    return functions.fill_random_float;
  } else if constexpr (std::is_same_v<T, double>) {
    return functions.fill_random_double;
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return functions.fill_random_int64;
  } else {
    return functions.fill_random_bool;
  }
}

}  // namespace

template <typename T>
const char* fill_random_cuda(T* out, const RandomNumbers& numbers, const int64_t* seed, const RandomBox& box,
                             void* stream) {
  const auto* const functions = cuda_library().functions;
  return functions != nullptr ? function_of<T>(*functions)(out, numbers, seed, box, stream)
                              : why_no_cuda_kernels();
}

template const char* fill_random_cuda(float*, const RandomNumbers&, const int64_t*, const RandomBox&, void*);
template const char* fill_random_cuda(double*, const RandomNumbers&, const int64_t*, const RandomBox&, void*);
template const char* fill_random_cuda(int64_t*, const RandomNumbers&, const int64_t*, const RandomBox&,
                                      void*);
template const char* fill_random_cuda(bool*, const RandomNumbers&, const int64_t*, const RandomBox&, void*);

}  // namespace funcol::kernels
