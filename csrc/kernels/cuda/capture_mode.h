// The CUDA functions behind RelaxedCapture (kernels/capture_mode.h).
#pragma once

namespace funcol::kernels::cuda {

// Relaxes the thread's capture mode; returns what it was.
int relax_capture_mode();

void set_capture_mode(int mode);

}  // namespace funcol::kernels::cuda
