#include "stream.h"

#include <algorithm>

namespace simulated_gpu {

// splitmix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators").
uint64_t mixed_with_seed(uint64_t value) {
  value += 0x9E3779B97F4A7C15U * (options().seed + 1);
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

Streams::Streams() {
  for (int device = 0; device < options().num_devices; ++device) {
    default_.push_back(make(device, true, 0));
    per_thread_.push_back(make(device, true, 0));
  }
}

StreamPointer Streams::make(int device, bool blocking, int priority) {
  const uint64_t id = num_made_++;
  every_.push_back(std::make_shared<Stream>(Stream{device, blocking, priority, id, mixed_with_seed(id)}));
  return every_.back();
}

void Streams::drop_destroyed(int device) {
  const auto is_over = [device](const StreamPointer& stream) {
    return stream->destroyed && stream->device == device && stream->queue.empty();
  };
  std::erase_if(every_, is_over);
}

StreamPointer Streams::find(cudaStream_t handle, int device) const {
  if (handle == nullptr || handle == cudaStreamLegacy) {
    return default_of(device);
  }
  if (handle == cudaStreamPerThread) {
    return per_thread_[static_cast<size_t>(device)];
  }
  const auto found = std::ranges::find_if(
      every_, [&](const StreamPointer& stream) { return handle_of(stream) == handle && !stream->destroyed; });
  return found == every_.end() ? nullptr : *found;
}

bool Streams::is_default(const StreamPointer& stream) const { return stream == default_of(stream->device); }

}  // namespace simulated_gpu
