// One call while its stream runs it.
//
// A rank of a collective leaves its call and its input for every other rank, and awaits theirs, so ranks
// whose calls differ find out. The input is copied when the stream reaches the call; what happens to it later
// changes nothing. The output has no value until the call finishes, so it is poisoned. A send waits until it
// is received, as large ones do on a GPU. A call whose peers never come waits for ever, unless its
// communicator ends.
//
// With options().alone there are no letters: all other ranks are taken to have sent what this one sends, or
// zeros where it sends nothing.
//
//   running.send(); running.poison_output(); while (!running.poll()) ...;
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nccl/call.h"
#include "nccl/communicator.h"
#include "nccl/mailbox.h"

namespace simulated_gpu::nccl {

class RunningCall {
 public:
  RunningCall(CommunicatorPtr communicator, Call call);

  // Reads the input, and leaves it for the peers.
  void send();

  void poison_output() const;

  // Returns true if the call has completed: its inputs have come and the output is written, or the
  // communicator has ended.
  bool poll();

  // Adds what poll() waits for.
  void add_waits(std::vector<Wait>& waits) const;

 private:
  void await(int rank, const std::string& key);
  bool all_has_come();
  void check(int rank, const Letter& letter);
  void write_output() const;
  std::vector<const void*> inputs(size_t offset) const;  // of all ranks, each from `offset` bytes

  CommunicatorPtr communicator_;
  Call call_;
  std::string sent_;                              // the key of the own letter
  std::vector<char> input_;                       // as it was when the call started
  std::vector<std::unique_ptr<Letter>> awaited_;  // by rank; null where nothing is awaited
  std::vector<bool> is_checked_;                  // by rank
};

}  // namespace simulated_gpu::nccl
