// Streams of the CUDA runtime, and what may be enqueued on them besides kernels and copies.
#include <cuda_runtime_api.h>

#include "runtime.h"

namespace simulated_gpu {
namespace {

// A question to a stream that would have to look at its finished work.
cudaError_t check_query(Locked& runtime, const StreamPointer& stream) {
  if (!stream) {
    return cudaErrorInvalidResourceHandle;
  }
  if (stream->capture) {
    stream->capture->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  return runtime->captures.check_unsafe_call();
}

}  // namespace

cudaError_t enqueue(cudaStream_t handle, Work work) {
  const TracedCall call;
  const IssuedPointer place = issue_place(work);
  Locked runtime;
  const StreamPointer stream = runtime.find(handle);
  if (!stream) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (const auto error = runtime.issue(stream, std::move(work), {}, place)) {
    return remember(error);
  }
  return remember(runtime->scheduler.failure());
}

bool is_capturing(cudaStream_t handle) {
  Locked runtime;
  const StreamPointer stream = runtime.find(handle);
  return stream && stream->capture;
}

}  // namespace simulated_gpu

using namespace simulated_gpu;  // NOLINT(google-build-using-namespace)

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  Locked runtime;
  const bool blocking = (flags & cudaStreamNonBlocking) == 0;
  *out = Streams::handle_of(runtime->streams.make(current_device(), blocking, priority));
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  Locked runtime;
  const StreamPointer stream = runtime.find(handle);
  if (!stream) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  Streams::destroy(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  Locked runtime;
  const StreamPointer stream = runtime.find(handle);
  if (!stream) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Locked runtime;
  const StreamPointer stream = runtime.find(handle);
  if (const auto error = check_query(runtime, stream)) {
    return remember(error);
  }
  return remember(runtime.wait_for(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Locked runtime;
  const StreamPointer stream = runtime.find(handle);
  if (const auto error = check_query(runtime, stream)) {
    return remember(error);
  }
  if (!stream->queue.empty()) {
    return remember(cudaErrorNotReady);
  }
  runtime.note_finished(stream->clock);
  return remember(runtime->scheduler.failure());
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return enqueue(stream, {"a host function", at_once([=] { function(data); }), {}, {}, Kind::kOrder});
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned /*flags*/) {
  if (is_capturing(stream)) {
    return remember(cudaErrorStreamCaptureUnsupported);
  }
  return enqueue(stream,
                 {"a callback", at_once([=] { function(stream, cudaSuccess, data); }), {}, {}, Kind::kOrder});
}

}  // extern "C"
