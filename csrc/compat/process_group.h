// Functions of process groups that differ between PyTorch releases.
//
// PyTorch renamed the collectives on flat tensors: newer releases deprecate the old names and route them to
// the new ones, older releases have only the old ones. The member that exists is picked at compile time; both
// take (output, input, options) and return the Work.
#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <type_traits>
#include <vector>

namespace funcol::compat {

// Returns the group registered under `name` in c10d's registry, or null. Catches the exception for a missing
// name, because not every PyTorch release can be queried for one.
inline c10::intrusive_ptr<c10d::ProcessGroup> registered_group(const std::string& name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    return {};
  }
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> all_gather_flat_coalesced(Group& group, std::vector<at::Tensor>& outputs,
                                                         std::vector<at::Tensor>& inputs,
                                                         const c10d::AllgatherOptions& options) {
  if constexpr (requires { group.all_gather_single_coalesced(outputs, inputs, options); }) {
    return group.all_gather_single_coalesced(outputs, inputs, options);
  } else {
    return group.allgather_into_tensor_coalesced(outputs, inputs, options);
  }
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> reduce_scatter_flat_coalesced(Group& group, std::vector<at::Tensor>& outputs,
                                                             std::vector<at::Tensor>& inputs,
                                                             const c10d::ReduceScatterOptions& options) {
  if constexpr (requires { group.reduce_scatter_single_coalesced(outputs, inputs, options); }) {
    return group.reduce_scatter_single_coalesced(outputs, inputs, options);
  } else {
    return group.reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
}

namespace detail {

// Calls `coalesced` with lists of one tensor for a group without backends, as PyTorch's functional
// collectives do. Calls `flat` for others, and if the group's class, often written in Python, lacks the
// method. A missing method raises c10::Error before anything is sent; a method in Python raises errors of
// another type.
template <typename Target, typename Coalesced, typename Flat>
c10::intrusive_ptr<c10d::Work> coalesced_or_flat(Target& target, const at::Tensor& output,
                                                 const at::Tensor& input, const Coalesced& coalesced,
                                                 const Flat& flat) {
  if constexpr (std::is_base_of_v<c10d::ProcessGroup, Target>) {
    if (!target.hasBackends()) {
      std::vector<at::Tensor> outputs{output};
      std::vector<at::Tensor> inputs{input};
      try {
        return coalesced(outputs, inputs);
      } catch (const c10::Error&) {
        return flat();
      }
    }
  }
  return flat();
}

}  // namespace detail

template <typename Group>
c10::intrusive_ptr<c10d::Work> all_gather_flat(Group& group, at::Tensor& output, at::Tensor& input,
                                               const c10d::AllgatherOptions& options) {
  const auto coalesced = [&](auto& outputs, auto& inputs) {
    return all_gather_flat_coalesced(group, outputs, inputs, options);
  };
  return detail::coalesced_or_flat(group, output, input, coalesced, [&] {
    if constexpr (requires { group.all_gather_single(output, input, options); }) {
      return group.all_gather_single(output, input, options);
    } else {
      return group._allgather_base(output, input, options);
    }
  });
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> reduce_scatter_flat(Group& group, at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  const auto coalesced = [&](auto& outputs, auto& inputs) {
    return reduce_scatter_flat_coalesced(group, outputs, inputs, options);
  };
  return detail::coalesced_or_flat(group, output, input, coalesced, [&] {
    if constexpr (requires { group.reduce_scatter_single(output, input, options); }) {
      return group.reduce_scatter_single(output, input, options);
    } else {
      return group._reduce_scatter_base(output, input, options);
    }
  });
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> all_to_all_flat(Group& group, at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) {
  if constexpr (requires { group.all_to_all_single(output, input, output_splits, input_splits, options); }) {
    return group.all_to_all_single(output, input, output_splits, input_splits, options);
  } else {
    return group.alltoall_base(output, input, output_splits, input_splits, options);
  }
}

}  // namespace funcol::compat
