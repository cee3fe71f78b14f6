#include "nccl/call.h"

#include <algorithm>

#include "nccl/reduction.h"

namespace simulated_gpu::nccl {

std::string name_of(CallKind kind) {
  static const char* const names[] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce",
                                      "all_to_all", "gather",     "scatter",        "send",      "receive"};
  return names[static_cast<int>(kind)];
}

Sizes sizes_of(const Call& call, int rank, int num_ranks) {
  const size_t one = call.count * size_of(call.type);
  const size_t all = one * static_cast<size_t>(num_ranks);
  const bool is_root = rank == call.root;
  switch (call.kind) {
    case CallKind::kAllReduce:
      return {one, one};
    case CallKind::kAllGather:
      return {one, all};
    case CallKind::kReduceScatter:
      return {all, one};
    case CallKind::kAllToAll:
      return {all, all};
    case CallKind::kBroadcast:
      return {is_root ? one : 0, one};
    case CallKind::kScatter:
      return {is_root ? all : 0, one};
    case CallKind::kReduce:
      return {one, is_root ? one : 0};
    case CallKind::kGather:
      return {one, is_root ? all : 0};
    case CallKind::kSend:
      return {one, 0};
    case CallKind::kReceive:
      return {0, one};
  }
  return {0, 0};
}

void add_ranges(const Call& call, int rank, int num_ranks, std::vector<Range>& reads,
                std::vector<Range>& writes) {
  const Sizes sizes = sizes_of(call, rank, num_ranks);
  if (sizes.input > 0) reads.push_back({call.input, sizes.input});
  if (sizes.output > 0) writes.push_back({call.output, sizes.output});
  if (call.factor && call.factor->device_address) {
    reads.push_back({call.factor->device_address, size_of(call.factor->type)});
  }
}

Announcement announcement_of(const Call& call) {
  return {call.kind, call.type, std::min<int32_t>(call.op, ncclNumOps), call.root, call.count};
}

std::string to_text(const Announcement& announcement) {
  std::string text = name_of(announcement.kind) + "(count " + std::to_string(announcement.count) + ", " +
                     name_of(static_cast<ncclDataType_t>(announcement.type));
  const std::string root = std::to_string(announcement.root);
  switch (announcement.kind) {
    case CallKind::kReduce:
      text += ", root " + root;
      [[fallthrough]];
    case CallKind::kAllReduce:
    case CallKind::kReduceScatter:
      text += ", " + name_of(static_cast<ncclRedOp_t>(announcement.op));
      break;
    case CallKind::kBroadcast:
    case CallKind::kGather:
    case CallKind::kScatter:
      text += ", root " + root;
      break;
    case CallKind::kSend:
      text += ", to rank " + root;
      break;
    case CallKind::kReceive:
      text += ", from rank " + root;
      break;
    case CallKind::kAllGather:
    case CallKind::kAllToAll:
      break;
  }
  return text + ")";
}

}  // namespace simulated_gpu::nccl
