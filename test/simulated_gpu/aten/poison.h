// Memory that the caching allocator reuses.
#pragma once

namespace simulated_gpu::aten {

// From now on every block is overwritten with kPoisonByte when its stream reaches the point of its
// allocation, as by the first kernel of its new owner. So code that reads memory before writing it, or still
// uses memory that another stream got, finds NaN. (To overwrite at the time of the free would be too strict:
// the stream may still be made to wait before the next allocation.) The allocator has to be initialized.
void poison_allocated_memory();

}  // namespace simulated_gpu::aten
