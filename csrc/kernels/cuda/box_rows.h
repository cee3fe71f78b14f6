// The implementation of copy_boxes_cuda() (kernels/box_rows.h).
#pragma once

#include "kernels/box_rows.h"

namespace funcol::kernels::cuda {

const char* copy_boxes(const RowBox* boxes, size_t num_boxes, void* stream);

}  // namespace funcol::kernels::cuda
