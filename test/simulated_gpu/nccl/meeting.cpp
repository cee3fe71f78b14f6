#include "nccl/meeting.h"

#include <system_error>
#include <thread>

#include "nccl/mailbox.h"
#include "simulated_gpu.h"

namespace simulated_gpu::nccl {

Meeting::Meeting(std::string key, int rank, int num_ranks, std::string what)
    : key_(std::move(key)), rank_(rank), num_ranks_(num_ranks), said_(std::move(what)) {
  if (options().alone) return;
  try {
    if (!post(key_ + "-" + std::to_string(rank_), std::to_string(num_ranks_), said_, num_ranks_ - 1)) {
      note(ncclInvalidUsage, "rank " + std::to_string(rank_) + " comes twice");
    }
  } catch (const std::system_error& error) {
    note(ncclSystemError, error.what());
  }
}

void Meeting::note(ncclResult_t error, const std::string& problem) {
  error_ = error;
  problem_ = problem;
}

bool Meeting::differs(int rank, const std::string& num_ranks) {
  if (num_ranks == std::to_string(num_ranks_)) return false;
  note(ncclInvalidArgument, "rank " + std::to_string(rank_) + " says that there are " +
                                std::to_string(num_ranks_) + " ranks, rank " + std::to_string(rank) +
                                " that there are " + num_ranks);
  return true;
}

std::optional<std::vector<std::string>> Meeting::wait(std::chrono::milliseconds timeout) {
  if (error_ != ncclSuccess) return std::nullopt;
  if (options().alone) return std::vector<std::string>(static_cast<size_t>(num_ranks_), said_);
  const auto end = std::chrono::steady_clock::now() + timeout;
  std::vector<std::string> all;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank == rank_) {
      all.push_back(said_);
      continue;
    }
    Letter letter(key_ + "-" + std::to_string(rank));
    while (!letter.has_arrived()) {
      if (std::chrono::steady_clock::now() > end) {
        note(ncclSystemError, "rank " + std::to_string(rank) + " of " + std::to_string(num_ranks_) +
                                  " did not come within " + std::to_string(timeout.count()) + " ms");
        withdraw(key_ + "-" + std::to_string(rank_));
        return std::nullopt;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    if (differs(rank, std::string(letter.head()))) return std::nullopt;
    all.emplace_back(letter.body());
  }
  return all;
}

}  // namespace simulated_gpu::nccl
