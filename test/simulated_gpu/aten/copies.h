// aten::copy_ on CUDA: the one operator with a kernel of its own, since it takes tensors of several devices.
#pragma once

namespace simulated_gpu::aten {

void register_copies();

}  // namespace simulated_gpu::aten
