#include "nccl/creation.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>

#include "nccl/deadlock.h"
#include "nccl/last_error.h"
#include "nccl/leftovers.h"
#include "nccl/meeting.h"
#include "simulated_gpu.h"

namespace simulated_gpu::nccl {
namespace {

Finish refused(ncclResult_t error, const std::string& why) {
  return [=] { return refuse(error, why); };
}

// Empty if the id is none that new_unique_id() made.
std::string key_of(const ncclUniqueId& id) {
  const std::string prefix = kFilePrefix;
  const std::string text(id.internal, strnlen(id.internal, sizeof id.internal));
  return text.starts_with(prefix) ? text.substr(prefix.size()) : "";
}

std::string as_text(int first, int second) { return std::to_string(first) + " " + std::to_string(second); }

std::pair<int, int> as_numbers(const std::string& text) {
  const auto space = text.find(' ');
  return {std::stoi(text), std::stoi(text.substr(space))};
}

// Meets the ranks of a communicator and makes it.
Finish begin(const std::string& key, int rank, int num_ranks, int device, ncclComm_t* result) {
  auto meeting = std::make_shared<Meeting>(key + "-init", rank, num_ranks, "");
  return [=] {
    if (!meeting->wait()) return refuse(meeting->error(), "no communicator: " + meeting->problem());
    set_on_stall(on_stall);
    *result = publish(std::make_shared<Communicator>(key, rank, num_ranks, device));
    return ncclSuccess;
  };
}

}  // namespace

ncclUniqueId new_unique_id() {
  std::random_device random;
  char number[17];
  snprintf(number, sizeof number, "%08x%08x", random(), random());
  ncclUniqueId id = {};
  snprintf(id.internal, sizeof id.internal, "%s%s-%s", kFilePrefix, this_process().c_str(), number);
  return id;
}

Finish begin_init(ncclComm_t* result, int num_ranks, const ncclUniqueId& id, int rank) {
  const std::string key = key_of(id);
  if (key.empty()) return refused(ncclInvalidArgument, "not a unique id of ncclGetUniqueId()");
  if (num_ranks < 1 || rank < 0 || rank >= num_ranks) {
    return refused(ncclInvalidArgument,
                   "no rank " + std::to_string(rank) + " of " + std::to_string(num_ranks));
  }
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return refused(ncclUnhandledCudaError, "cudaGetDevice failed");
  remove_leftovers();
  return begin(key, rank, num_ranks, device, result);
}

ncclResult_t init_all(ncclComm_t* results, int num_ranks, const int* devices) {
  if (num_ranks < 1) return refuse(ncclInvalidArgument, "ncclCommInitAll of no ranks");
  const std::string key = key_of(new_unique_id());
  std::vector<Finish> finishes;
  finishes.reserve(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    finishes.push_back(begin(key, rank, num_ranks, devices ? devices[rank] : rank, results + rank));
  }
  for (const Finish& finish : finishes) {
    if (const ncclResult_t error = finish()) return error;
  }
  return ncclSuccess;
}

Finish begin_split(const CommunicatorPtr& parent, int color, int order, ncclComm_t* result) {
  if (color < 0 && color != NCCL_SPLIT_NOCOLOR) return refused(ncclInvalidArgument, "a negative color");
  if (options().alone) return refused(ncclInvalidUsage, "no split: alone, nobody knows the others' colors");
  const std::string key = parent->next_child("split");
  auto meeting = std::make_shared<Meeting>(key, parent->rank(), parent->num_ranks(), as_text(color, order));
  return [=] {
    *result = nullptr;
    const auto all = meeting->wait();
    if (!all) return refuse(meeting->error(), "no split: " + meeting->problem());
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    std::vector<std::pair<int, int>> members;  // order, rank in the parent
    for (int rank = 0; rank < parent->num_ranks(); ++rank) {
      const auto [its_color, its_order] = as_numbers((*all)[static_cast<size_t>(rank)]);
      if (its_color == color) members.emplace_back(its_order, rank);
    }
    std::ranges::sort(members);
    const auto me = std::ranges::find(members, std::pair(order, parent->rank()));
    *result = publish(std::make_shared<Communicator>(key + "color" + std::to_string(color),
                                                     static_cast<int>(me - members.begin()),
                                                     static_cast<int>(members.size()), parent->device()));
    return ncclSuccess;
  };
}

Finish begin_shrink(const CommunicatorPtr& parent, const std::vector<int>& excluded, ncclComm_t* result) {
  const auto is_excluded = [&](int rank) { return std::ranges::find(excluded, rank) != excluded.end(); };
  if (is_excluded(parent->rank()))
    return refused(ncclInvalidArgument, "an excluded rank shrinks the communicator");
  std::string who = "without";
  int rank = 0, num_ranks = 0;
  for (int r = 0; r < parent->num_ranks(); ++r) {
    if (is_excluded(r)) {
      who += std::to_string(r) + "_";
    } else {
      rank += r < parent->rank();
      ++num_ranks;
    }
  }
  return begin(parent->next_child(who + "shrink"), rank, num_ranks, parent->device(), result);
}

}  // namespace simulated_gpu::nccl
