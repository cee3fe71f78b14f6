#include "nccl/communicator.h"

#include <system_error>
#include <unordered_map>

#include "nccl/last_error.h"

namespace simulated_gpu::nccl {
namespace {

std::string message_key(const std::string& communicator, int from, int to, uint64_t number) {
  return communicator + "-message" + std::to_string(from) + "to" + std::to_string(to) + "-" +
         std::to_string(number);
}

struct Registry {
  std::mutex mutex;
  std::unordered_map<ncclComm_t, CommunicatorPtr> communicators;
};

Registry& registry() {
  static auto* const registry = new Registry();  // never destroyed: threads may outlive main()
  return *registry;
}

}  // namespace

Communicator::Communicator(std::string key, int rank, int num_ranks, int device)
    : key_(std::move(key)),
      rank_(rank),
      num_ranks_(num_ranks),
      device_(device),
      failure_of_others_(key_ + "-failure") {}

Communicator::~Communicator() {
  if (!has_told_others_) failure_of_others_.has_arrived();  // so that it counts as read
}

std::string Communicator::next_collective() {
  return key_ + "-collective" + std::to_string(num_collectives_++) + "-";
}

std::string Communicator::next_message_to(int peer) {
  return message_key(key_, rank_, peer, num_sent_[peer]++);
}

std::string Communicator::next_message_from(int peer) {
  return message_key(key_, peer, rank_, num_received_[peer]++);
}

std::string Communicator::next_child(const std::string& how) {
  const std::scoped_lock lock(mutex_);
  return key_ + "-" + how + std::to_string(num_children_++);
}

void Communicator::fail(ncclResult_t error, const std::string& why) {
  ncclResult_t expected = ncclSuccess;
  if (!error_.compare_exchange_strong(expected, error)) return;
  refuse(error, why);
  try {
    has_told_others_ = post(key_ + "-failure", why, "", num_ranks_ - 1);  // else another rank has
  } catch (const std::system_error&) {
    has_told_others_ = false;  // they wait until they are aborted
  }
}

bool Communicator::hears_of_failure() {
  if (num_ranks_ == 1 || error_ != ncclSuccess || !failure_of_others_.has_arrived()) return false;
  ncclResult_t expected = ncclSuccess;
  if (error_.compare_exchange_strong(expected, ncclRemoteError)) {
    refuse(ncclRemoteError, "another rank failed: " + std::string(failure_of_others_.head()));
  }
  return true;
}

ncclRedOp_t Communicator::add_factor(std::shared_ptr<const Factor> factor) {
  const std::scoped_lock lock(mutex_);
  const int op = ncclNumOps + num_factors_++;
  factors_[op] = std::move(factor);
  return static_cast<ncclRedOp_t>(op);
}

std::shared_ptr<const Factor> Communicator::factor(ncclRedOp_t op) const {
  const std::scoped_lock lock(mutex_);
  const auto it = factors_.find(op);
  return it == factors_.end() ? nullptr : it->second;
}

bool Communicator::remove_factor(ncclRedOp_t op) {
  const std::scoped_lock lock(mutex_);
  return factors_.erase(op) > 0;
}

ncclComm_t publish(CommunicatorPtr communicator) {
  const auto handle = reinterpret_cast<ncclComm_t>(communicator.get());
  const std::scoped_lock lock(registry().mutex);
  registry().communicators[handle] = std::move(communicator);
  return handle;
}

std::vector<CommunicatorPtr> all_communicators() {
  const std::scoped_lock lock(registry().mutex);
  std::vector<CommunicatorPtr> all;
  all.reserve(registry().communicators.size());
  for (const auto& [handle, communicator] : registry().communicators) all.push_back(communicator);
  return all;
}

CommunicatorPtr find(ncclComm_t handle) {
  const std::scoped_lock lock(registry().mutex);
  const auto it = registry().communicators.find(handle);
  return it == registry().communicators.end() ? nullptr : it->second;
}

CommunicatorPtr forget(ncclComm_t handle) {
  const std::scoped_lock lock(registry().mutex);
  const auto it = registry().communicators.find(handle);
  if (it == registry().communicators.end()) return nullptr;
  CommunicatorPtr communicator = std::move(it->second);
  registry().communicators.erase(it);
  return communicator;
}

}  // namespace simulated_gpu::nccl
