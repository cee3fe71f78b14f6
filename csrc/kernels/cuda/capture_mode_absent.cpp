#include "kernels/capture_mode.h"

namespace funcol::kernels {

RelaxedCapture::RelaxedCapture() = default;
RelaxedCapture::~RelaxedCapture() = default;

}  // namespace funcol::kernels
