// Events of the CUDA runtime.
#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <set>

#include "runtime.h"
#include "trace.h"

namespace simulated_gpu {
namespace {

struct Event {
  unsigned flags;
  bool recorded = false;
  Mark mark = {};
  Clock clock = {};                                 // of the stream when the event was recorded
  std::shared_ptr<std::atomic<int64_t>> time = {};  // nanoseconds, once the stream reached it

  // The place in the graph, if the event was last recorded on a stream that captures.
  CapturePointer capture = nullptr;
  std::set<size_t> capture_after = {};
};

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

cudaError_t check_query(Locked& runtime, const Event* event) {
  return event->capture ? cudaErrorCapturedEvent : runtime->captures.check_unsafe_call();
}

// Returns when the stream reached the event; the epoch if it is not recorded.
SteadyClock::time_point time_of(const Event* event) {
  return SteadyClock::time_point(SteadyClock::duration(event->time ? event->time->load() : 0));
}

cudaError_t record(Locked& runtime, Event* event, const StreamPointer& stream) {
  event->capture = nullptr;
  event->time = std::make_shared<std::atomic<int64_t>>(0);
  event->recorded = true;
  const auto note_time = [time = event->time] { *time = SteadyClock::now().time_since_epoch().count(); };
  const cudaError_t error = runtime.issue(
      stream, {"the record of an event", at_once(note_time), {}, {}, Kind::kOrder}, {}, nullptr);
  event->mark = {stream, stream->num_issued};
  event->clock = stream->clock;
  return error;
}

}  // namespace
}  // namespace simulated_gpu

using namespace simulated_gpu;  // NOLINT(google-build-using-namespace)

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned flags) {
  *out = reinterpret_cast<cudaEvent_t>(new Event{flags});
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned flags) {
  Locked runtime;
  const StreamPointer stream = runtime.find(stream_handle);
  Event* const event = event_of(handle);
  if (!stream || event == nullptr) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (stream->capture) {
    if ((flags & cudaEventRecordExternal) != 0) {
      return not_simulated("an event that is recorded from within a graph");
    }
    if (stream->capture->invalid) {
      return remember(cudaErrorStreamCaptureInvalidated);
    }
    event->capture = stream->capture;
    event->capture_after = stream->capture_after;
    return cudaSuccess;
  }
  return remember(record(runtime, event, stream));
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Locked runtime;
  const Event* const event = event_of(handle);
  if (const auto error = check_query(runtime, event)) {
    return remember(error);
  }
  if (!event->mark.done() || !runtime.shows_finished(event->clock, time_of(event))) {
    return remember(cudaErrorNotReady);
  }
  return remember(runtime->scheduler.failure());
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Locked runtime;
  const Event* const event = event_of(handle);
  if (const auto error = check_query(runtime, event)) {
    return remember(error);
  }
  return remember(runtime.wait_for(event->mark, event->clock));
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  Locked runtime;
  const Event* const first = event_of(begin);
  const Event* const second = event_of(end);
  if (!first->recorded || !second->recorded ||
      ((first->flags | second->flags) & cudaEventDisableTiming) != 0) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (*first->time == 0 || *second->time == 0) {
    return remember(cudaErrorNotReady);
  }
  constexpr float kNanosecondsInOne = 1e6F;
  *milliseconds = static_cast<float>(*second->time - *first->time) / kNanosecondsInOne;
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned /*flags*/) {
  Locked runtime;
  const StreamPointer stream = runtime.find(stream_handle);
  const Event* const event = event_of(handle);
  if (!stream || event == nullptr) {
    return remember(cudaErrorInvalidResourceHandle);
  }
  if (event->capture) {
    return remember(runtime->captures.join(stream, event->capture, event->capture_after,
                                           runtime->streams.is_default(stream)));
  }
  if (!event->recorded) {
    return cudaSuccess;
  }
  if (stream->capture) {
    stream->capture->invalid = true;
    return remember(cudaErrorStreamCaptureIsolation);
  }
  if (!is_to_note(event->mark)) {  // it is done, in this run; the order holds in all
    stream->clock.merge(event->clock);
    return cudaSuccess;
  }
  return remember(runtime.issue(stream, {"a wait for an event", at_once([] {}), {}, {}, Kind::kOrder}, {},
                                nullptr, event->mark, &event->clock));
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* /*handle*/, cudaEvent_t /*event*/) {
  return not_simulated("cudaIpcGetEventHandle");
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* /*event*/, cudaIpcEventHandle_t /*handle*/) {
  return not_simulated("cudaIpcOpenEventHandle");
}

}  // extern "C"
