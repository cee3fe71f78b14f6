// Names of c10d::ProcessGroup members that differ between PyTorch minors.
//
// PyTorch renamed the flat all_gather and reduce_scatter: newer minors deprecate the underscored names
// and route them to the new ones, older minors have only the old. The member that exists is picked at
// compile time; both take (output, input, options) and return the Work.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace funcol::compat {

template <typename Group>
c10::intrusive_ptr<c10d::Work> all_gather_flat(Group& group, at::Tensor& output, at::Tensor& input,
                                               const c10d::AllgatherOptions& options) {
  if constexpr (requires { group.all_gather_single(output, input, options); }) {
    return group.all_gather_single(output, input, options);
  } else {
    return group._allgather_base(output, input, options);
  }
}

template <typename Group>
c10::intrusive_ptr<c10d::Work> reduce_scatter_flat(Group& group, at::Tensor& output, at::Tensor& input,
                                                   const c10d::ReduceScatterOptions& options) {
  if constexpr (requires { group.reduce_scatter_single(output, input, options); }) {
    return group.reduce_scatter_single(output, input, options);
  } else {
    return group._reduce_scatter_base(output, input, options);
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
