#include "async/comm_tensor.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/alias.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "async/arguments.h"
#include "async/async_tensor.h"
#include "async/buffer_release.h"
#include "async/dispatch_modes.h"
#include "async/pending_collective.h"
#include "comm/custom_class.h"
#include "comm/extract_if.h"
#include "comm/orphaned_works.h"
#include "comm/process_group.h"

namespace funcol {

MemoryRange::MemoryRange(const c10::TensorImpl& tensor)
    : storage(tensor.unsafe_storage().unsafeGetStorageImpl()),
      begin(tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize())) {
  const auto item_size = static_cast<int64_t>(tensor.itemsize());
  end = begin + 1;
  if (tensor.numel() != 0) {
    end = begin + item_size;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      end += (tensor.sizes()[dim] - 1) * tensor.strides()[dim] * item_size;
    }
  }
}

bool MemoryRange::overlaps(const MemoryRange& other) const noexcept {
  return storage == other.storage && begin < other.end && other.begin < end;
}

InPlaceCollectives::InPlaceCollectives() = default;
InPlaceCollectives::~InPlaceCollectives() = default;

void InPlaceCollectives::add(const MemoryRange& written, PendingPtr collective) {
  const std::scoped_lock lock(mutex_);
  running_.push_back({written, std::move(collective)});
  num_running_.store(running_.size(), std::memory_order_release);
  any_started_.store(true, std::memory_order_release);
}

bool InPlaceCollectives::is_pending(const MemoryRange& range) const {
  if (num_running_.load(std::memory_order_acquire) == 0) {
    return false;
  }
  const std::scoped_lock lock(mutex_);
  return std::ranges::any_of(running_, [&](const RunningCollective& started) {
    return started.written.overlaps(range) && !started.collective->is_settled();
  });
}

void InPlaceCollectives::settle(const MemoryRange& range) {
  if (num_running_.load(std::memory_order_acquire) == 0) {
    return;
  }
  std::vector<PendingPtr> awaited;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& started : running_) {
      if (started.written.overlaps(range)) {
        awaited.push_back(started.collective);
      }
    }
  }
  for (const auto& collective : awaited) {
    collective->settle();
  }
  forget_settled();
}

void InPlaceCollectives::forget_settled() {
  std::vector<RunningCollective> settled;  // destroyed after the lock is released
  const std::scoped_lock lock(mutex_);
  settled =
      extract_if(running_, [](const RunningCollective& started) { return started.collective->is_settled(); });
  num_running_.store(running_.size(), std::memory_order_release);
}

namespace {

constexpr const char* kCollectives[] = {
    "_allgather_base_", "_reduce_scatter_base_", "allreduce_", "allgather_", "alltoall_",
    "broadcast_",       "reduce_scatter_",       "scatter_"};

// One call of a collective. The backend gets plain aliases of the CommTensors: its threads must not wait for
// the collective that they run.
class CollectiveCall {
 public:
  CollectiveCall(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack)
      : op_(op), keys_below_(keys & kBelow), stack_(stack) {}

  void run() {
    settle_arguments();
    const c10::IValue written = arguments_of(op_, *stack_)[0];
    std::vector<at::Tensor> outputs;
    visit_tensors(written, [&](const at::Tensor& tensor) {
      if (is_comm_tensor(tensor)) {
        outputs.push_back(tensor);
      }
    });
    if (outputs.empty()) {
      return op_.redispatchBoxed(keys_below_, stack_);
    }
    auto start = describe();
    pass_plain_aliases(start);
    op_.redispatchBoxed(keys_below_, stack_);
    auto results = torch::jit::last(*stack_, op_.schema().returns().size());
    start.work = custom_class<c10d::Work>(results.back());
    (stack_->end() - static_cast<int64_t>(results.size()))[0] = written;
    if (start.work) {
      wait_in_place(outputs, std::move(start));
    }
  }

 private:
  static constexpr c10::DispatchKeySet kBelow{c10::DispatchKeySet::FULL_AFTER,
                                              c10::DispatchKey::BackendSelect};

  void settle_arguments() const {
    for (const auto& argument : arguments_of(op_, *stack_)) {
      visit_tensors(argument, [](const at::Tensor& tensor) { settle(tensor); });
    }
  }

  StartedCollective describe() const {
    StartedCollective start;
    start.op = interned("CommTensor(" + op_.schema().name() + ")");
    for (const auto& argument : arguments_of(op_, *stack_)) {
      if (const auto group = custom_class<c10d::ProcessGroup>(argument)) {
        start.group = group;
      }
    }
    return start;
  }

  void pass_plain_aliases(StartedCollective& start) {
    const auto first = stack_->end() - static_cast<int64_t>(op_.schema().arguments().size());
    for (auto argument = first; argument != stack_->end(); ++argument) {
      *argument = replace_tensors(*argument, [&](const at::Tensor& tensor) {
        const auto plain = is_comm_tensor(tensor) ? AsyncTensorImpl::of(tensor)->plain_alias() : tensor;
        (argument == first ? start.outputs : start.buffers).push_back(plain);
        return plain;
      });
    }
  }

  const c10::OperatorHandle& op_;
  c10::DispatchKeySet keys_below_;
  torch::jit::Stack* stack_;
};

void start_collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  CollectiveCall(op, keys, stack).run();
}

}  // namespace

bool is_comm_tensor(const at::Tensor& tensor) {
  const auto* impl = tensor.defined() ? AsyncTensorImpl::of(tensor) : nullptr;
  return impl != nullptr && impl->in_place() != nullptr;
}

at::Tensor comm_tensor(const at::Tensor& tensor) {
  if (is_comm_tensor(tensor)) {
    return tensor;
  }
  settle(tensor);
  TORCH_CHECK_TYPE((AsyncTensorImpl::can_wrap(tensor) || AsyncTensorImpl::of(tensor) != nullptr) &&
                       !belongs_to_layer(tensor),
                   "funcol::CommTensor: the tensor is sparse, nested, a subclass, or inside a transform. "
                   "Collectives write into plain memory: pass the dense tensor that holds it, such as "
                   "t.to_local() of a DTensor.");
  const OutsideLayers outside_layers;
  return AsyncTensorImpl::wrap(at::alias(tensor), c10::make_intrusive<InPlaceCollectives>());
}

void wait_in_place(at::TensorList written, StartedCollective collective) {
  sweep_orphans();
  const auto pending = make_pending_collective(std::move(collective));
  for (const auto& tensor : written) {
    const auto* impl = AsyncTensorImpl::of(tensor);
    impl->in_place()->add(MemoryRange(*impl), pending);
  }
}

}  // namespace funcol

// Every call passes BackendSelect, below all layers, even where the wake key is excluded on this thread or
// hidden in a list of lists.
TORCH_LIBRARY_IMPL(c10d, BackendSelect, m) {
  for (const auto* name : funcol::kCollectives) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&funcol::start_collective>());
  }
}
