// A meeting of ranks: each says something, and all learn what all said. Communicators are made by meetings.
// With options().alone, the others are taken to say what this rank says.
#pragma once

#include <nccl.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace simulated_gpu::nccl {

// How long a rank waits for the others.
constexpr std::chrono::seconds kMeetingTimeout{120};

class Meeting {
 public:
  // Says `what` at once without waiting, so one thread may come as several ranks. `key` names the
  // meeting.
  Meeting(std::string key, int rank, int num_ranks, std::string what);

  // Blocks the host until all have come. What they said, in the order of ranks. Nothing if some did not come
  // in time, if shared memory is full (ncclSystemError), if ranks differ on the number of ranks
  // (ncclInvalidArgument), or if a rank came twice (ncclInvalidUsage).
  std::optional<std::vector<std::string>> wait(std::chrono::milliseconds timeout = kMeetingTimeout);

  ncclResult_t error() const { return error_; }
  const std::string& problem() const { return problem_; }

 private:
  void note(ncclResult_t error, const std::string& problem);
  bool differs(int rank, const std::string& num_ranks);

  std::string key_;
  int rank_, num_ranks_;
  std::string said_;
  ncclResult_t error_ = ncclSuccess;
  std::string problem_;
};

}  // namespace simulated_gpu::nccl
