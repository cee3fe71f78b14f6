#include "nccl/operation.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <string>

#include "nccl/collective.h"

namespace simulated_gpu::nccl {
namespace {

using Clock = std::chrono::steady_clock;

class Operation {
 public:
  Operation(CommunicatorPtr communicator, const std::vector<Call>& calls)
      : communicator_(std::move(communicator)) {
    for (const Call& call : calls) calls_.emplace_back(communicator_, call);
    if (const auto delay = static_cast<uint64_t>(options().delay_us)) {
      not_before_ = Clock::now() + std::chrono::microseconds(simulated_gpu::random() % delay);
    }
  }

  std::vector<Wait> waits() const {
    std::vector<Wait> waits;
    for (const RunningCall& call : calls_) call.add_waits(waits);
    return waits;
  }

  void start() {
    for (RunningCall& call : calls_) {
      if (!communicator_->has_ended()) call.send();
    }
    for (RunningCall& call : calls_) call.poison_output();
  }

  bool poll() {
    if (Clock::now() < not_before_ && !communicator_->has_ended()) return false;
    std::erase_if(calls_, [](RunningCall& call) { return call.poll(); });
    return calls_.empty();
  }

  // Runs `run`. Where the machine fails, as when shared memory is full, the communicator does, and the work
  // is over.
  template <typename Run>
  bool guarded(Run run) {
    try {
      return run();
    } catch (const std::exception& error) {
      report(std::string("nccl: ") + error.what());
      communicator_->fail(ncclSystemError, error.what());
      return true;
    }
  }

 private:
  CommunicatorPtr communicator_;
  std::vector<RunningCall> calls_;
  Clock::time_point not_before_ = {};
};

std::string name_of(const std::vector<Call>& calls) {
  std::vector<std::string> names;
  for (const Call& call : calls) {
    const std::string name = name_of(call.kind);
    if (std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  std::string all = "nccl " + names[0];
  for (size_t i = 1; i < names.size(); ++i) all += " + " + names[i];
  return all;
}

Step begin(const CommunicatorPtr& communicator, const std::vector<Call>& calls) {
  auto operation = std::make_shared<Operation>(communicator, calls);
  const bool failed = operation->guarded([&] {
    operation->start();
    return false;
  });
  if (failed) return nullptr;
  communicator->set_running({name_of(calls), [operation] { return operation->waits(); }});
  return [communicator, operation] {
    const bool is_over = operation->guarded([&] { return operation->poll(); });
    if (is_over) communicator->set_running({});
    return is_over;
  };
}

}  // namespace

Work make_work(const CommunicatorPtr& communicator, const std::vector<Call>& calls) {
  Work work;
  work.name = name_of(calls);
  work.begin = [communicator, calls] { return begin(communicator, calls); };
  for (const Call& call : calls) {
    add_ranges(call, communicator->rank(), communicator->num_ranks(), work.reads, work.writes);
  }
  work.kind = Kind::kCollective;
  work.chain = communicator.get();
  work.amount.num_ranks = communicator->num_ranks();
  return work;
}

}  // namespace simulated_gpu::nccl
