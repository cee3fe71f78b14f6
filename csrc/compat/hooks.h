// Hooks of process groups around collectives, such as those of PyTorch's flight recorder and its check for
// NaNs: PyTorch 2.15 and newer.
//
// c10d's operators call them, backends do not.
#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace funcol::compat {

#ifdef C10D_BACKEND_HAS_HOOKS

// A group's backend whose collectives call the group's hooks, with what c10d's operators pass to them.
//
// PyTorch counterpart: the kernels in torch/csrc/distributed/c10d/Ops.cpp.
class HookedBackend {
  using Name = c10d::HookOpName;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

 public:
  HookedBackend(c10d::ProcessGroup& group, c10d::Backend& backend) : group_(group), backend_(backend) {}

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
    return with_hooks(Name::ALLREDUCE, options.asyncOp, kNoRoot, tensors, Tensors(),
                      [&] { return backend_.allreduce(tensors, options); });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
    return with_hooks(Name::ALLREDUCE_COALESCED, options.asyncOp, kNoRoot, tensors, Tensors(),
                      [&] { return backend_.allreduce_coalesced(tensors, options); });
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
    return with_hooks(Name::BROADCAST, options.asyncOp, options.rootRank, tensors, Tensors(),
                      [&] { return backend_.broadcast(tensors, options); });
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options = {}) {
    return with_hooks(Name::ALLGATHER, options.asyncOp, kNoRoot, inputs, outputs,
                      [&] { return backend_.allgather(outputs, inputs, options); });
  }

  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
    return with_hooks(Name::ALLGATHER_BASE, options.asyncOp, kNoRoot, input, output,
                      [&] { return backend_.all_gather_single(output, input, options); });
  }

  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                      const c10d::AllgatherOptions& options) {
    return with_hooks(Name::ALLGATHER_INTO_TENSOR_COALESCED, options.asyncOp, kNoRoot, inputs, outputs,
                      [&] { return backend_.all_gather_single_coalesced(outputs, inputs, options); });
  }

  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) {
    return with_hooks(Name::REDUCE_SCATTER_BASE, options.asyncOp, kNoRoot, input, output,
                      [&] { return backend_.reduce_scatter_single(output, input, options); });
  }

  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) {
    return with_hooks(Name::REDUCE_SCATTER_TENSOR_COALESCED, options.asyncOp, kNoRoot, inputs, outputs,
                      [&] { return backend_.reduce_scatter_single_coalesced(outputs, inputs, options); });
  }

  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
    return with_hooks(Name::ALLTOALL_BASE, options.asyncOp, kNoRoot, input, output, [&] {
      return backend_.all_to_all_single(output, input, output_splits, input_splits, options);
    });
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) {
    return with_hooks(Name::SEND, /*async_op=*/true, peer, tensors, Tensors(),
                      [&] { return backend_.send(tensors, peer, tag); });
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) {
    return with_hooks(Name::RECV, /*async_op=*/true, peer, Tensors(), tensors,
                      [&] { return backend_.recv(tensors, peer, tag); });
  }

 private:
  static constexpr int64_t kNoRoot = -1;

  template <typename Inputs, typename Outputs, typename Start>
  WorkPtr with_hooks(Name name, bool is_async, int64_t root, const Inputs& inputs, const Outputs& outputs,
                     const Start& start) {
    const auto number = group_.firePreHook(name, is_async, root, inputs, outputs);
    auto work = start();
    group_.firePostHook(name, is_async, number, work);
    return work;
  }

  c10d::ProcessGroup& group_;
  c10d::Backend& backend_;
};

// Calls `collective(target)`, where target is the backend and calls the hooks that the group has.
template <typename Collective>
c10::intrusive_ptr<c10d::Work> on_hooked_backend(c10d::ProcessGroup& group, c10d::Backend& backend,
                                                 const Collective& collective) {
  HookedBackend target(group, backend);
  return collective(target);
}

#else

template <typename Collective>
c10::intrusive_ptr<c10d::Work> on_hooked_backend(c10d::ProcessGroup& /*group*/, c10d::Backend& backend,
                                                 const Collective& collective) {
  return collective(backend);
}

#endif

}  // namespace funcol::compat
