#include "kernels/capture_mode.h"

#include "kernels/cuda_library.h"

namespace funcol::kernels {

RelaxedCapture::RelaxedCapture() {
  if (const auto* const functions = cuda_library().functions) {
    mode_before_ = functions->relax_capture_mode();
  }
}

RelaxedCapture::~RelaxedCapture() {
  if (const auto* const functions = cuda_library().functions) {
    functions->set_capture_mode(mode_before_);
  }
}

}  // namespace funcol::kernels
