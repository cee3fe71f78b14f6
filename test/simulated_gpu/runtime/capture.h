// Stream captures: from cudaStreamBeginCapture() to cudaStreamEndCapture().
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "graph.h"
#include "stream.h"

namespace simulated_gpu {

struct Capture {
  unsigned long long id;
  Graph* graph;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  Stream* origin;
  bool owns_graph;  // it is the program's own after cudaStreamBeginCaptureToGraph()
  bool invalid = false;
  std::set<Stream*> streams = {};
  std::map<const void*, size_t> chains = {};  // the last node of each
};
using CapturePointer = std::shared_ptr<Capture>;

// The captures in progress.
class Captures {
 public:
  // Captures to `graph`, behind the nodes `after`; null: to a new one.
  cudaError_t begin(const StreamPointer& stream, cudaStreamCaptureMode mode, Graph* graph,
                    std::set<size_t> after);

  // Ends the stream's capture. On success `graph` is what was captured; else a graph that the capture made is
  // gone.
  cudaError_t end(const StreamPointer& stream, Graph** graph);

  // Adds what the stream is to do as a node.
  static cudaError_t record(const StreamPointer& stream, Work work, std::vector<const void*> chains,
                            IssuedPointer issued);

  // Adds a stream to the capture of an event that it waits for.
  cudaError_t join(const StreamPointer& stream, const CapturePointer& capture, const std::set<size_t>& after,
                   bool is_default_stream);

  // CUDA's rule for calls that may be unsafe while a stream captures (cudaThreadExchangeStreamCaptureMode).
  // An error also invalidates the capture.
  cudaError_t check_unsafe_call();

  // CUDA's rule for work on the default stream, which would wait for blocking streams that capture.
  cudaError_t check_default_stream(int device);

  // Returns true if a blocking stream captures: the default stream has no state of its own then.
  bool blocks_default_stream() const;

  const std::vector<CapturePointer>& in_progress() const { return in_progress_; }

 private:
  bool has(const CapturePointer& capture) const;

  std::vector<CapturePointer> in_progress_;
  unsigned long long num_begun_ = 0;
};

// The current thread's mode; returns the one before.
cudaStreamCaptureMode exchange_capture_mode(cudaStreamCaptureMode mode);

}  // namespace simulated_gpu
