#include "poison.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <cstring>
#include <string>

#include "places.h"
#include "simulated_gpu.h"

namespace simulated_gpu::aten {
namespace {

using c10::cuda::CUDACachingAllocator::TraceEntry;

// The allocator calls this under its lock. What goes wrong here, a capture that ended badly, the program's
// next launch reports.
void poison(const TraceEntry& entry) {
  if (entry.action_ != TraceEntry::ALLOC || entry.size_ == 0) {
    return;
  }
  const WithoutPlaces without_places;
  const c10::cuda::CUDAGuard guard(entry.device_);
  const auto* const block = reinterpret_cast<const void*>(entry.addr_);  // NOLINT(performance-no-int-to-ptr)
  Work work;
  work.name = "poison of " + std::to_string(entry.size_) + " bytes";
  work.begin = at_once([block, size = entry.size_] { std::memset(host_address(block), kPoisonByte, size); });
  work.writes = {{block, entry.size_}};
  work.kind = Kind::kPoison;
  static_cast<void>(enqueue(static_cast<cudaStream_t>(entry.stream_), std::move(work)));
}

}  // namespace

void poison_allocated_memory() { c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(poison); }

}  // namespace simulated_gpu::aten
