// One thread that runs what is queued on all streams, one operation at a time, in an order that the seed
// decides.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <vector>

#include "stream.h"

namespace simulated_gpu {

using Lock = std::unique_lock<std::mutex>;

class Scheduler {
 public:
  // The runtime's lock. Operations run without it.
  std::mutex mutex;

  // With the lock held, all of the following.

  // Waits while too much is queued.
  void make_room(Lock& lock);

  // Adds an operation to the end of a stream's queue. Of each chain it comes after the operation before it.
  Mark push(const StreamPointer& stream, Operation operation, const std::vector<const void*>& chains);

  // Returns when all are done, or an error: of an operation that failed, or that the caller must not wait.
  cudaError_t wait_for(Lock& lock, const std::vector<Mark>& marks);

  // Of the first operation that failed; as on a device, every later call reports it.
  cudaError_t failure() const { return failure_; }

  // The scheduler's thread may not call what waits or enqueues.
  static bool is_this_thread();

  uint64_t random() { return generator_(); }

 private:
  void run();
  bool run_one(Lock& lock);
  void finish_front(Lock& lock, Stream* stream);
  bool wait_for_work(Lock& lock);
  void look_for_stall(Lock& lock);
  void end_stall();

  Stream* pick();
  Stream* pick_urgent(const std::vector<Stream*>& candidates);
  std::vector<Stream*> demanded(SteadyClock::time_point now) const;

  std::condition_variable work_, done_;
  std::mt19937_64 generator_{options().seed};
  std::vector<Stream*> active_;         // those with something queued, by id
  std::deque<Mark> demands_;            // what threads wait for
  std::map<const void*, Mark> chains_;  // the last operation of each
  size_t num_queued_ = 0;
  uint64_t num_issued_ = 0;
  SteadyClock::time_point last_issue_;
  SteadyClock::time_point next_look_ = {};  // for a stall, unless something begins or finishes before
  bool is_stall_told_ = false;
  bool started_ = false;
  cudaError_t failure_ = cudaSuccess;
};

}  // namespace simulated_gpu
