// The functions that libfuncol_cuda.so exports.
#include "kernels/cuda/box_rows.h"
#include "kernels/cuda/capture_mode.h"
#include "kernels/cuda/random.h"
#include "kernels/cuda/rank_major.h"
#include "kernels/cuda_library.h"

namespace funcol::kernels::cuda {
namespace {

constexpr CudaFunctions kFunctions = {.merge_shards = merge_shards,
                                      .split_shards = split_shards,
                                      .copy_boxes = copy_boxes,
                                      .fill_random_float = fill_random<float>,
                                      .fill_random_double = fill_random<double>,
                                      .fill_random_int64 = fill_random<int64_t>,
                                      .fill_random_bool = fill_random<bool>,
                                      .relax_capture_mode = relax_capture_mode,
                                      .set_capture_mode = set_capture_mode};

}  // namespace

extern "C" __attribute__((visibility("default"))) const CudaFunctions* funcol_cuda_functions() {
  return &kFunctions;
}

}  // namespace funcol::kernels::cuda
