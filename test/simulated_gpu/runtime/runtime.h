// The state of the simulated CUDA runtime, and what every call on a stream has in common.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "access_history.h"
#include "capture.h"
#include "clock.h"
#include "scheduler.h"
#include "simulated_gpu.h"
#include "stream.h"

namespace simulated_gpu {

struct Runtime {
  Scheduler scheduler;
  Streams streams;
  Captures captures;

  AccessHistory history;
  Clock seen_by_host;  // operations that the program knows to be finished

  // Bytes of the host that work writes which may still run.
  std::vector<std::pair<Range, Mark>> host_writes;

  std::unordered_map<const void*, std::string> kernels;  // demangled names, by the host's functions
  std::unordered_map<const void*, void*> symbols;        // device variables, by the host's
  std::vector<std::pair<std::string, Implement>> implementations;

  // Races that the call in progress found: their texts need what is not to be had under the lock.
  std::vector<Conflict> conflicts;
};

// The runtime, locked. What was found meanwhile is reported once the lock is gone.
class Locked {
 public:
  Locked();
  ~Locked();
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

  Runtime* operator->() { return &runtime_; }

  // The stream of a handle, on the current device; null if there is none.
  StreamPointer find(cudaStream_t handle);

  // Puts work at the end of a stream: on its queue, or into the graph that it captures. `after`, what has to
  // be finished first besides, comes with the clock of the moment that it marks.
  cudaError_t issue(const StreamPointer& stream, Work work, std::vector<const void*> chains,
                    const IssuedPointer& issued, const Mark& after = {}, const Clock* after_clock = nullptr);

  // Returns true if queued work may still write to the host's memory in one of `ranges`.
  bool will_be_written(const std::vector<Range>& ranges);

  // Returns once a stream's, or a device's, work is finished; the host knows it then.
  cudaError_t wait_for(const StreamPointer& stream);
  cudaError_t wait_for_device(int device);
  cudaError_t wait_for(const Mark& mark, const Clock& clock);

  // Notes that the program knows all that `clock` covers to be finished.
  void note_finished(const Clock& clock);

  // Returns true if a query by the calling thread may find what `clock` covers finished, as it has been since
  // `time`, and notes that. The watchdog of a process group finds it finished once the program knows it, or
  // kWatchdogDelay later: it tells the program what it saw, or not, in ways that are not simulated.
  bool shows_finished(const Clock& clock, SteadyClock::time_point time);

 private:
  void order_behind_default_stream(const StreamPointer& stream, Operation& operation);
  void note_host_writes(const std::vector<Range>& ranges, const Mark& mark);
  void note_accesses(const StreamPointer& stream, const Work& work, const IssuedPointer& issued);

  TracedCall call_;  // ends after the lock
  Runtime& runtime_;
  Lock lock_;
};

// Returns the place where the caller issues `work`, if races are looked for. Call it without the lock.
IssuedPointer issue_place(const Work& work);

// The calling thread's device, and its last error as cudaGetLastError() has it.
int current_device();
void set_current_device(int device);
cudaError_t remember(cudaError_t error);  // returns it
cudaError_t last_error(bool clear);

// A function that exists and cannot be simulated.
cudaError_t not_simulated(const char* function);

}  // namespace simulated_gpu
