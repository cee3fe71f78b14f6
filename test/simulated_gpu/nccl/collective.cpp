#include "nccl/collective.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "nccl/reduction.h"

namespace simulated_gpu::nccl {
namespace {

std::string name_of_rank(int rank) { return "rank " + std::to_string(rank); }

Announcement read_announcement(const Letter& letter) {
  Announcement announcement;
  std::memcpy(&announcement, letter.head().data(), sizeof announcement);
  return announcement;
}

uint64_t bytes_of(const Announcement& announcement) {
  return announcement.count * size_of(static_cast<ncclDataType_t>(announcement.type));
}

}  // namespace

RunningCall::RunningCall(CommunicatorPtr communicator, Call call)
    : communicator_(std::move(communicator)), call_(std::move(call)) {
  awaited_.resize(static_cast<size_t>(communicator_->num_ranks()));
  is_checked_.resize(awaited_.size());
}

void RunningCall::await(int rank, const std::string& key) {
  awaited_[static_cast<size_t>(rank)] = std::make_unique<Letter>(key);
}

void RunningCall::send() {
  if (call_.kind == CallKind::kReceive && options().alone) return;
  if (call_.kind == CallKind::kReceive)
    return await(call_.root, communicator_->next_message_from(call_.root));
  const int rank = communicator_->rank(), num_ranks = communicator_->num_ranks();
  const size_t size = sizes_of(call_, rank, num_ranks).input;
  if (size > 0) {
    const auto* const from = static_cast<const char*>(host_address(call_.input));
    input_.assign(from, from + size);
  }
  if (call_.factor) {
    const void* const device = call_.factor->device_address;
    multiply(input_.data(), size / size_of(call_.type), call_.type,
             device ? host_address(device) : call_.factor->value.data());
  }
  if (options().alone) return;
  const bool to_one = call_.kind == CallKind::kSend;
  const std::string key =
      to_one ? communicator_->next_message_to(call_.root) : communicator_->next_collective();
  sent_ = to_one ? key : key + std::to_string(rank);
  const Announcement announcement = announcement_of(call_);
  if (!post(sent_, {reinterpret_cast<const char*>(&announcement), sizeof announcement}, {input_.data(), size},
            to_one ? 1 : num_ranks - 1)) {
    throw std::logic_error("a letter " + sent_ + " is there already");
  }
  for (int peer = 0; !to_one && peer < num_ranks; ++peer) {
    if (peer != rank) await(peer, key + std::to_string(peer));
  }
}

void RunningCall::poison_output() const {
  const size_t size = sizes_of(call_, communicator_->rank(), communicator_->num_ranks()).output;
  if (size > 0) std::memset(host_address(call_.output), kPoisonByte, size);
}

bool RunningCall::poll() {
  if (communicator_->is_aborted()) {
    if (!sent_.empty()) withdraw(sent_);
    return true;
  }
  if (communicator_->has_ended()) return true;
  if (!all_has_come()) return communicator_->has_ended() || communicator_->hears_of_failure();
  write_output();
  return true;
}

bool RunningCall::all_has_come() {
  bool all = call_.kind != CallKind::kSend || options().alone || !is_unread(sent_);
  for (size_t rank = 0; rank < awaited_.size(); ++rank) {
    if (!awaited_[rank] || is_checked_[rank]) continue;
    if (!awaited_[rank]->has_arrived()) {
      all = false;
      continue;
    }
    is_checked_[rank] = true;
    check(static_cast<int>(rank), *awaited_[rank]);
    if (communicator_->has_ended()) return false;
  }
  return all;
}

void RunningCall::add_waits(std::vector<Wait>& waits) const {
  if (call_.kind == CallKind::kSend && !sent_.empty()) waits.push_back({call_.root, sent_, true});
  for (size_t rank = 0; rank < awaited_.size(); ++rank) {
    if (awaited_[rank] && !is_checked_[rank]) {
      waits.push_back({static_cast<int>(rank), awaited_[rank]->key(), false});
    }
  }
}

// A receive fits a send of as many bytes. The calls of a collective must be equal.
void RunningCall::check(int rank, const Letter& letter) {
  const Announcement mine = announcement_of(call_), theirs = read_announcement(letter);
  const bool is_receive = call_.kind == CallKind::kReceive;
  if (is_receive ? bytes_of(mine) == bytes_of(theirs) : mine == theirs) return;
  const std::string why = std::string(is_receive ? "a send and its receive differ" : "ranks disagree") +
                          " on a communicator of " + std::to_string(communicator_->num_ranks()) +
                          " ranks:\n  " + name_of_rank(communicator_->rank()) + " calls " + to_text(mine) +
                          "\n  " + name_of_rank(rank) + " calls " + to_text(theirs);
  report("nccl: " + why);
  communicator_->fail(ncclInvalidUsage, why);
}

std::vector<const void*> RunningCall::inputs(size_t offset) const {
  std::vector<const void*> all;
  all.reserve(awaited_.size());
  for (const auto& letter : awaited_)
    all.push_back((letter ? letter->body().data() : input_.data()) + offset);
  return all;
}

void RunningCall::write_output() const {
  const auto rank = static_cast<size_t>(communicator_->rank());
  const size_t part = call_.count * size_of(call_.type);
  auto* const output = static_cast<char*>(host_address(call_.output));
  if (part == 0 || sizes_of(call_, communicator_->rank(), communicator_->num_ranks()).output == 0) return;
  const auto reduce_parts = [&](size_t offset) {
    reduce(inputs(offset), output, call_.count, call_.type, call_.factor ? ncclSum : call_.op);
  };
  const auto gather_parts = [&](size_t offset) {
    const auto parts = inputs(offset);
    for (size_t i = 0; i < parts.size(); ++i) std::memcpy(output + i * part, parts[i], part);
  };
  const auto copy_from_root = [&](size_t offset) {
    if (input_.empty() && options().alone) {
      std::memset(output, 0, part);
      return;
    }
    const auto root = static_cast<size_t>(call_.root);
    std::memcpy(output, (awaited_[root] ? awaited_[root]->body().data() : input_.data()) + offset, part);
  };
  switch (call_.kind) {
    case CallKind::kAllReduce:
    case CallKind::kReduce:
      return reduce_parts(0);
    case CallKind::kReduceScatter:
      return reduce_parts(rank * part);
    case CallKind::kAllGather:
    case CallKind::kGather:
      return gather_parts(0);
    case CallKind::kAllToAll:
      return gather_parts(rank * part);
    case CallKind::kBroadcast:
    case CallKind::kReceive:
      return copy_from_root(0);
    case CallKind::kScatter:
      return copy_from_root(rank * part);
    case CallKind::kSend:
      return;
  }
}

}  // namespace simulated_gpu::nccl
