// A communicator as one rank has it: who belongs to it, how far its calls are, and how it ended.
//
// A communicator ends by abort() or by a failure. When it has ended, its running and queued operations finish
// at once and leave their outputs poisoned. A failure of one rank reaches the others: they, too, would wait
// for ever.
#pragma once

#include <nccl.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "nccl/call.h"
#include "nccl/mailbox.h"

namespace simulated_gpu::nccl {

// A letter without which a running operation cannot finish: it has to arrive from `rank`, or, if `is_own`, to
// be read by it.
struct Wait {
  int rank;
  std::string letter;
  bool is_own;
};

class Communicator {
 public:
  // `key` begins the keys of all letters and is the same on all ranks.
  Communicator(std::string key, int rank, int num_ranks, int device);
  ~Communicator();

  const std::string& key() const { return key_; }
  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  int device() const { return device_; }

  // Keys of letters. Calls are counted when streams reach them, so that a graph may be replayed.
  std::string next_collective();          // a rank's letter: this and its number
  std::string next_message_to(int peer);  // what the peer calls next_message_from(this rank)
  std::string next_message_from(int peer);

  // The key under which the children of a next split or shrink are made; counted when the host calls.
  std::string next_child(const std::string& how);

  void abort() { is_aborted_ = true; }
  bool is_aborted() const { return is_aborted_; }

  // The first failure stays; other ranks learn of it.
  void fail(ncclResult_t error, const std::string& why);

  // ncclSuccess, or how this rank failed; ncclRemoteError once hears_of_failure() was true.
  ncclResult_t error() const { return error_; }

  bool has_ended() const { return is_aborted_ || error_ != ncclSuccess; }

  // Returns true if another rank failed. Called by operations that wait.
  bool hears_of_failure();

  // The operation that runs, if one does; `waits` is what it waits for now. Of the thread that runs
  // operations.
  struct Running {
    std::string name;
    std::function<std::vector<Wait>()> waits;
  };
  void set_running(Running running) { running_ = std::move(running); }
  const Running& running() const { return running_; }

  // Premultiplied sums, by the op that the caller was given.
  ncclRedOp_t add_factor(std::shared_ptr<const Factor> factor);
  std::shared_ptr<const Factor> factor(ncclRedOp_t op) const;  // null: no such op
  bool remove_factor(ncclRedOp_t op);

 private:
  const std::string key_;
  const int rank_, num_ranks_, device_;

  // These are of the thread that runs operations.
  uint64_t num_collectives_ = 0;
  std::map<int, uint64_t> num_sent_, num_received_;
  Letter failure_of_others_;
  bool has_told_others_ = false;
  Running running_;

  std::atomic<bool> is_aborted_{false};
  std::atomic<ncclResult_t> error_{ncclSuccess};

  mutable std::mutex mutex_;  // of what follows
  uint64_t num_children_ = 0;
  int num_factors_ = 0;
  std::map<int, std::shared_ptr<const Factor>> factors_;
};

using CommunicatorPtr = std::shared_ptr<Communicator>;

// Returns the communicators that programs hold.
std::vector<CommunicatorPtr> all_communicators();

// Communicators by the handles that programs hold. Operations that run keep a communicator alive.
ncclComm_t publish(CommunicatorPtr communicator);
CommunicatorPtr find(ncclComm_t handle);    // null: no such communicator
CommunicatorPtr forget(ncclComm_t handle);  // returns what it was

}  // namespace simulated_gpu::nccl
