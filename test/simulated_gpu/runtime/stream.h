// Simulated streams: queues of operations.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <vector>

#include "clock.h"
#include "simulated_gpu.h"

namespace simulated_gpu {

struct Stream;
struct Capture;
using StreamPointer = std::shared_ptr<Stream>;
using SteadyClock = std::chrono::steady_clock;

// The first `count` operations of a stream.
struct Mark {
  StreamPointer stream;
  uint64_t count = 0;

  bool done() const;
};

struct Operation {
  Work work;
  std::shared_ptr<const IssuePlace> place = nullptr;  // null if unknown
  std::vector<Mark> after = {};                       // what has to be finished before it begins
  uint64_t order = 0;                                 // of issue, over all streams
  Step step = nullptr;                                // set once it began, while there is more to do
  SteadyClock::time_point not_before = {};
};

// Fields are guarded by the runtime's lock.
struct Stream {
  int device;
  bool blocking;  // waits for the default stream, and the default stream for it
  int priority;
  uint64_t id;
  uint64_t urgency;  // what the scheduler draws in order `random`
  bool destroyed = false;

  std::deque<Operation> queue = {};
  uint64_t num_issued = 0;
  uint64_t num_finished = 0;  // only grows
  Clock clock = {};           // what is ordered before its next operation

  // While it takes part in a capture: the nodes that its next node comes after, by their indices.
  std::shared_ptr<Capture> capture = nullptr;
  std::set<size_t> capture_after = {};
  std::vector<cudaGraphNode_t> capture_handles = {};  // returned by cudaStreamGetCaptureInfo()
};

inline bool Mark::done() const { return !stream || stream->num_finished >= count; }

// All streams of the process, by handle.
class Streams {
 public:
  Streams();

  StreamPointer make(int device, bool blocking, int priority);

  // Takes the handle of a stream away. Its work still runs, and stays ordered as before.
  static void destroy(const StreamPointer& stream) { stream->destroyed = true; }

  // Drops the destroyed streams of a device, once the host knows that all of its work is finished.
  void drop_destroyed(int device);

  // The stream of a handle, seen from `device`; null if there is none.
  StreamPointer find(cudaStream_t handle, int device) const;

  bool is_default(const StreamPointer& stream) const;
  const StreamPointer& default_of(int device) const { return default_[static_cast<size_t>(device)]; }

  // In the order in which they were made; destroyed ones are among them until drop_destroyed().
  const std::vector<StreamPointer>& every() const { return every_; }

  static cudaStream_t handle_of(const StreamPointer& stream) {
    return reinterpret_cast<cudaStream_t>(stream.get());
  }

 private:
  std::vector<StreamPointer> every_;
  std::vector<StreamPointer> default_, per_thread_;  // of each device
  uint64_t num_made_ = 0;
};

// `value`, well mixed with the seed: the same in every run of that seed.
uint64_t mixed_with_seed(uint64_t value);

}  // namespace simulated_gpu
