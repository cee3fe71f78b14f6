#include <algorithm>
#include <limits>

#include "kernels/cuda/functions.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/move_boxes.h"

namespace funcol::kernels::cuda {
namespace {

static_assert(sizeof(MoveBoxes<uint4, uint64_t>) <= 4096, "the parameters of a kernel");

template <typename Vector>
const char* launch_as(const RowBox* boxes, size_t num_boxes, cudaStream_t stream) {
  int64_t num_vectors = 0;
  for (size_t i = 0; i < num_boxes; ++i) {
    num_vectors += boxes[i].num_bytes() / int64_t{sizeof(Vector)};
  }
  if (num_vectors <= std::numeric_limits<int32_t>::max()) {
    return launch(MoveBoxes<Vector, uint32_t>(boxes, num_boxes), stream);
  }
  return launch(MoveBoxes<Vector, uint64_t>(boxes, num_boxes), stream);
}

}  // namespace

const char* copy_boxes(const RowBox* boxes, size_t num_boxes, void* opaque_stream) {
  auto* const stream = static_cast<cudaStream_t>(opaque_stream);
  int64_t narrowest = 16;
  for (size_t i = 0; i < num_boxes; ++i) {
    narrowest = std::min(narrowest, vector_bytes(boxes[i]));
  }
  return launch_in_vectors(
      narrowest, [&](auto vector) { return launch_as<decltype(vector)>(boxes, num_boxes, stream); });
}

}  // namespace funcol::kernels::cuda
