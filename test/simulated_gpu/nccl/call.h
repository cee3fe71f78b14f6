// One call of a collective, or of a send or receive, as a value: what the caller gave, the bytes it reads and
// writes, and what other ranks must have called to match it.
#pragma once

#include <nccl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "simulated_gpu.h"

namespace simulated_gpu::nccl {

enum class CallKind : int32_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kReduce,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kReceive,
};

std::string name_of(CallKind kind);  // "all_reduce"

inline bool is_point_to_point(CallKind kind) { return kind == CallKind::kSend || kind == CallKind::kReceive; }

// The factor of a rank's input before a sum. Its value is known when the op is made, or lies on the device
// and is read when the collective runs.
struct Factor {
  ncclDataType_t type;
  std::array<char, 8> value = {};
  const void* device_address = nullptr;  // null: `value` holds it
};

struct Call {
  CallKind kind;
  const void* input;
  void* output;
  size_t count;  // as the caller gave it: of the whole, or of one rank's part
  ncclDataType_t type;
  ncclRedOp_t op = ncclSum;
  int root = 0;                                    // of a send or receive: the peer
  std::shared_ptr<const Factor> factor = nullptr;  // of a premultiplied sum
};

// Bytes that a rank reads and writes, each from the beginning of its buffer.
//
//   all_gather of 3 floats on 2 ranks: reads 12 bytes, writes 24; scatter of them: the root reads 24, all
//   write 12
struct Sizes {
  size_t input;
  size_t output;
};
Sizes sizes_of(const Call& call, int rank, int num_ranks);

// Device ranges of a call, for the search for races.
void add_ranges(const Call& call, int rank, int num_ranks, std::vector<Range>& reads,
                std::vector<Range>& writes);

// The description of a call for other ranks, at the head of its letter.
struct Announcement {
  CallKind kind;
  int32_t type;
  int32_t op;  // ncclNumOps for all premultiplied sums, whose factors may differ
  int32_t root;
  uint64_t count;

  bool operator==(const Announcement&) const = default;
};
Announcement announcement_of(const Call& call);

// "all_reduce(count 4, float32, sum)", "send(count 4, float32, to rank 1)"
std::string to_text(const Announcement& announcement);

}  // namespace simulated_gpu::nccl
