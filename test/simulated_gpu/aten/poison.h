// Memory that the caching allocator hands out anew.
#pragma once

namespace simulated_gpu::aten {

// From now on every block is overwritten with kPoisonByte when its stream comes to where it was handed out,
// as by the first kernel of its new owner. So whoever reads memory before writing it, or still uses memory
// that another stream got, finds NaN. (To overwrite at the time of the free would be too strict: the stream
// may still be made to wait before the next allocation.) The allocator has to be initialized.
void poison_allocated_memory();

}  // namespace simulated_gpu::aten
