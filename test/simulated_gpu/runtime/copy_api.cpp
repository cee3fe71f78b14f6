// Copies and fills of the CUDA runtime.
#include <cuda_runtime_api.h>

#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "memory.h"
#include "runtime.h"
#include "simulated_gpu.h"

namespace simulated_gpu {
namespace {

// `height` rows of `width` bytes, their beginnings `pitch` bytes apart.
struct Rows {
  const void* address;
  size_t pitch;
};

struct Copy {
  Rows to, from;
  size_t width, height;

  void run() const {
    auto* const out = static_cast<char*>(host_address(to.address));
    const auto* const in = static_cast<const char*>(host_address(from.address));
    for (size_t row = 0; row < height; ++row) {
      memmove(out + row * to.pitch, in + row * from.pitch, width);
    }
  }

  // Returns the contents of the source as one number.
  size_t digest() const {
    size_t digest = 0;
    for (size_t row = 0; row < height; ++row) {
      const auto* const begin = static_cast<const char*>(from.address) + row * from.pitch;
      digest = digest * 31 + std::hash<std::string_view>()({begin, width});
    }
    return digest;
  }

  std::vector<Range> ranges(const Rows& rows) const {
    std::vector<Range> ranges;
    ranges.reserve(height);
    for (size_t row = 0; row < height; ++row) {
      ranges.push_back({static_cast<const char*>(rows.address) + row * rows.pitch, width});
    }
    return ranges;
  }
};

// CUDA reads pageable memory before an asynchronous copy from it returns.
std::shared_ptr<std::vector<char>> stage(Copy& copy) {
  auto staged = std::make_shared<std::vector<char>>(copy.width * copy.height);
  for (size_t row = 0; row < copy.height; ++row) {
    memcpy(staged->data() + row * copy.width,
           static_cast<const char*>(copy.from.address) + row * copy.from.pitch, copy.width);
  }
  copy.from = {staged->data(), copy.width};
  return staged;
}

// Runs a copy from pinned memory, which the host must leave alone until then. A write of the same values is
// not seen.
Begin watched(const Copy& copy, const IssuedPointer& issued) {
  return at_once([copy, issued, digest = copy.digest()] {
    if (copy.digest() != digest) {
      std::ostringstream text;
      text << "race: pinned memory was written before a queued copy had read it, within "
           << copy.width * copy.height << " bytes at " << copy.from.address << "\n  a read by "
           << issued->text()
           << "\n  Wait for the copy before the next write: record an event after it and synchronize.";
      report(text.str());
    }
    copy.run();
  });
}

// A copy to pageable memory returns once it is done, whatever was asked for.
cudaError_t enqueue_copy(Copy copy, cudaStream_t handle, bool synchronous) {
  const TracedCall call;
  const bool to_pageable = !memory().find(copy.to.address);
  const bool from_pageable = !memory().find(copy.from.address);
  std::shared_ptr<std::vector<char>> staged;
  if (from_pageable && !synchronous && !is_capturing(handle)) {
    staged = stage(copy);
  }
  Work work{"a copy", at_once([copy, staged] { copy.run(); }), copy.ranges(copy.from), copy.ranges(copy.to),
            Kind::kCopy};
  const IssuedPointer place = issue_place(work);
  Locked runtime;
  const StreamPointer stream = runtime.find(handle);
  if (!stream) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (synchronous) {
    if (const auto error = runtime->captures.check_unsafe_call()) {
      return remember(error);
    }
  }
  if (stream->capture && (to_pageable || from_pageable)) {
    stream->capture->invalid = true;
    return remember(cudaErrorStreamCaptureUnsupported);
  }
  const bool reads_pinned = !from_pageable && !memory().is_device_address(copy.from.address);
  if (place && reads_pinned && !synchronous && !stream->capture && !runtime.will_be_written(work.reads)) {
    auto numbered = std::make_shared<Issued>(*place);
    numbered->line = stream->id;
    numbered->number = stream->num_issued + 1;
    work.begin = watched(copy, numbered);
  }
  if (const auto error = runtime.issue(stream, std::move(work), {}, place)) {
    return remember(error);
  }
  if ((synchronous || to_pageable) && !stream->capture) {
    return remember(runtime.wait_for(stream));
  }
  return remember(runtime->scheduler.failure());
}

cudaError_t enqueue_bytes(void* to, const void* from, size_t size, cudaStream_t stream, bool synchronous) {
  return enqueue_copy({{to, size}, {from, size}, size, 1}, stream, synchronous);
}

cudaError_t enqueue_fill(void* address, int value, size_t size, cudaStream_t handle, bool synchronous) {
  const TracedCall call;
  Work work{"a fill", at_once([=] { memset(host_address(address), value, size); }), {}, {{address, size}}};
  if (const auto error = enqueue(handle, std::move(work)); error != cudaSuccess || !synchronous) {
    return error;
  }
  Locked runtime;
  return remember(runtime.wait_for(runtime.find(handle)));
}

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;  // NOLINT(google-build-using-namespace)

extern "C" {

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  return enqueue_bytes(to, from, size, stream, false);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind /*kind*/) {
  return enqueue_bytes(to, from, size, nullptr, true);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int /*to_device*/, const void* from, int /*from_device*/,
                                size_t size, cudaStream_t stream) {
  return enqueue_bytes(to, from, size, stream, false);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind /*kind*/, cudaStream_t stream) {
  return enqueue_copy({{to, to_pitch}, {from, from_pitch}, width, height}, stream, false);
}

cudaError_t cudaMemset(void* address, int value, size_t size) {
  return enqueue_fill(address, value, size, nullptr, true);
}

cudaError_t cudaMemsetAsync(void* address, int value, size_t size, cudaStream_t stream) {
  return enqueue_fill(address, value, size, stream, false);
}

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  Locked runtime;
  const auto found = runtime->symbols.find(symbol);
  if (found == runtime->symbols.end()) {
    return remember(cudaErrorInvalidSymbol);
  }
  *address = found->second;
  return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t size, size_t offset,
                               cudaMemcpyKind /*kind*/) {
  void* address = nullptr;
  if (const auto error = cudaGetSymbolAddress(&address, symbol)) {
    return error;
  }
  return enqueue_bytes(static_cast<char*>(address) + offset, from, size, nullptr, true);
}

}  // extern "C"
