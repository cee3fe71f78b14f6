// Errors of the CUDA runtime: names, texts, and the last one of a thread.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>

#include "runtime.h"

namespace simulated_gpu {
namespace {

struct Description {
  cudaError_t error;
  const char* name;
  const char* text;
};

#define DESCRIPTION(error, text) \
  { error, #error, text }

// Errors that the simulation returns, in the words of CUDA's documentation.
constexpr Description kDescriptions[] = {
    DESCRIPTION(cudaSuccess, "no error"),
    DESCRIPTION(cudaErrorInvalidValue, "invalid argument"),
    DESCRIPTION(cudaErrorMemoryAllocation, "out of memory"),
    DESCRIPTION(cudaErrorInvalidDevice, "invalid device ordinal"),
    DESCRIPTION(cudaErrorInvalidSymbol, "invalid device symbol"),
    DESCRIPTION(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    DESCRIPTION(cudaErrorNotReady, "device not ready"),
    DESCRIPTION(cudaErrorLaunchFailure, "unspecified launch failure"),
    DESCRIPTION(cudaErrorNotSupported, "operation not supported"),
    DESCRIPTION(cudaErrorNotPermitted, "operation not permitted"),
    DESCRIPTION(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    DESCRIPTION(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    DESCRIPTION(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    DESCRIPTION(cudaErrorStreamCaptureUnmatched, "capture was not initiated in this stream"),
    DESCRIPTION(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    DESCRIPTION(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    DESCRIPTION(cudaErrorStreamCaptureImplicit,
                "operation would make the legacy stream depend on a capturing blocking stream"),
    DESCRIPTION(cudaErrorStreamCaptureMerge,
                "operation would result in a merge of separate capture sequences"),
    DESCRIPTION(cudaErrorStreamCaptureWrongThread,
                "attempt to terminate a thread-local capture sequence from another thread"),
    DESCRIPTION(cudaErrorCapturedEvent,
                "operation not permitted on an event last recorded in a capturing stream"),
};

#undef DESCRIPTION

const Description* describe(cudaError_t error) {
  const auto* const found =
      std::ranges::find_if(kDescriptions, [&](const Description& d) { return d.error == error; });
  return found == std::end(kDescriptions) ? nullptr : found;
}

}  // namespace
}  // namespace simulated_gpu

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  const auto* const found = simulated_gpu::describe(error);
  return found == nullptr ? "cudaErrorUnknown" : found->name;
}

const char* cudaGetErrorString(cudaError_t error) {
  const auto* const found = simulated_gpu::describe(error);
  return found == nullptr ? "unknown error" : found->text;
}

cudaError_t cudaGetLastError() { return simulated_gpu::last_error(true); }
cudaError_t cudaPeekAtLastError() { return simulated_gpu::last_error(false); }

}  // extern "C"
