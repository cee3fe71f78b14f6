#include "capture.h"

#include <algorithm>
#include <utility>

namespace simulated_gpu {
namespace {

thread_local cudaStreamCaptureMode t_mode = cudaStreamCaptureModeGlobal;

// Nodes of the graph from which none of `ends` can be reached: work that no stream joined to the origin's.
bool has_unjoined_work(const Capture& capture, const std::set<size_t>& ends) {
  std::set<size_t> joined(ends);
  std::vector<size_t> open(ends.begin(), ends.end());
  while (!open.empty()) {
    const size_t node = open.back();
    open.pop_back();
    for (const size_t before : capture.graph->nodes[node].after) {
      if (joined.insert(before).second) {
        open.push_back(before);
      }
    }
  }
  return std::ranges::any_of(capture.streams, [&](const Stream* stream) {
    return !std::ranges::includes(joined, stream->capture_after);
  });
}

}  // namespace

cudaStreamCaptureMode exchange_capture_mode(cudaStreamCaptureMode mode) {
  return std::exchange(t_mode, mode);
}

cudaError_t Captures::begin(const StreamPointer& stream, cudaStreamCaptureMode mode, Graph* graph,
                            std::set<size_t> after) {
  if (stream->capture) {
    return cudaErrorIllegalState;
  }
  const bool owns_graph = graph == nullptr;
  const auto capture =
      std::make_shared<Capture>(Capture{++num_begun_, owns_graph ? new Graph() : graph, mode,
                                        std::this_thread::get_id(), stream.get(), owns_graph});
  capture->streams.insert(stream.get());
  stream->capture = capture;
  stream->capture_after = std::move(after);
  in_progress_.push_back(capture);
  return cudaSuccess;
}

cudaError_t Captures::end(const StreamPointer& stream, Graph** graph) {
  const CapturePointer capture = stream->capture;
  if (!capture) {
    return cudaErrorIllegalState;
  }
  if (capture->origin != stream.get()) {
    return cudaErrorStreamCaptureUnmatched;
  }
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != std::this_thread::get_id()) {
    return cudaErrorStreamCaptureWrongThread;
  }
  const bool unjoined = has_unjoined_work(*capture, stream->capture_after);
  for (Stream* other : capture->streams) {
    other->capture = nullptr;
    other->capture_after.clear();
  }
  in_progress_.erase(std::ranges::find(in_progress_, capture));
  if (capture->invalid || unjoined) {
    if (capture->owns_graph) {
      delete capture->graph;
    }
    return capture->invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnjoined;
  }
  *graph = capture->graph;
  return cudaSuccess;
}

cudaError_t Captures::record(const StreamPointer& stream, Work work, std::vector<const void*> chains,
                             IssuedPointer issued) {
  Capture& capture = *stream->capture;
  if (capture.invalid) {
    return cudaErrorStreamCaptureInvalidated;
  }
  Nodes& nodes = capture.graph->nodes;
  for (const void* chain : chains) {
    const auto [last, is_new] = capture.chains.try_emplace(chain, nodes.size());
    if (!is_new) {
      stream->capture_after.insert(last->second);
      last->second = nodes.size();
    }
  }
  nodes.push_back({std::move(work),
                   {stream->capture_after.begin(), stream->capture_after.end()},
                   std::move(chains),
                   std::move(issued)});
  stream->capture_after = {nodes.size() - 1};
  return cudaSuccess;
}

cudaError_t Captures::join(const StreamPointer& stream, const CapturePointer& capture,
                           const std::set<size_t>& after, bool is_default_stream) {
  if (!has(capture)) {
    return cudaErrorCapturedEvent;
  }
  if (capture->invalid) {
    return cudaErrorStreamCaptureInvalidated;
  }
  if (stream->capture && stream->capture != capture) {
    capture->invalid = true;
    return cudaErrorStreamCaptureMerge;
  }
  if (is_default_stream) {
    capture->invalid = true;
    return cudaErrorStreamCaptureImplicit;
  }
  stream->capture = capture;
  capture->streams.insert(stream.get());
  stream->capture_after.insert(after.begin(), after.end());
  return cudaSuccess;
}

cudaError_t Captures::check_unsafe_call() {
  if (t_mode == cudaStreamCaptureModeRelaxed) {
    return cudaSuccess;
  }
  for (const CapturePointer& capture : in_progress_) {
    const bool mine = capture->thread == std::this_thread::get_id();
    const bool forbids =
        mine ? capture->mode != cudaStreamCaptureModeRelaxed
             : capture->mode == cudaStreamCaptureModeGlobal && t_mode == cudaStreamCaptureModeGlobal;
    if (forbids) {
      capture->invalid = true;
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  return cudaSuccess;
}

cudaError_t Captures::check_default_stream(int device) {
  for (const CapturePointer& capture : in_progress_) {
    if (capture->origin->blocking && capture->origin->device == device) {
      capture->invalid = true;
      return cudaErrorStreamCaptureImplicit;
    }
  }
  return cudaSuccess;
}

bool Captures::blocks_default_stream() const {
  return std::ranges::any_of(in_progress_,
                             [](const CapturePointer& capture) { return capture->origin->blocking; });
}

bool Captures::has(const CapturePointer& capture) const {
  return std::ranges::find(in_progress_, capture) != in_progress_.end();
}

}  // namespace simulated_gpu
