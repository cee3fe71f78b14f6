#include "kernels/box_rows.h"

#include "kernels/cuda_library.h"
#include "kernels/rank_major.h"

namespace funcol::kernels {

const char* copy_boxes_cuda(const RowBox* boxes, size_t num_boxes, void* stream) {
  const auto* const functions = cuda_library().functions;
  return functions != nullptr ? functions->copy_boxes(boxes, num_boxes, stream) : why_no_cuda_kernels();
}

}  // namespace funcol::kernels
