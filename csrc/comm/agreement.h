// Checks that the ranks of a group are about to run the same collective.
//
// When ranks call different collectives, or the same with different shapes, most backends hang, and some
// return wrong data. While agreement is checked, each call first publishes its description in the group's
// store and reads those of the other ranks; if they differ, every rank raises and nothing is sent. The mode
// is meant for finding a fault: a call costs several round trips to the store, and waits for all ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <string>

#include "comm/group_ref.h"

namespace funcol {

// Begins or ends checking, for all threads of this process; calls nest.
void check_agreement(bool begin);

bool agreement_is_checked();

// Tensors whose dtypes, devices and sizes must be equal on all ranks, except sizes along `free_dim`.
struct ComparedTensors {
  ComparedTensors(at::TensorList tensors, int64_t free_dim = -1)  // NOLINT(google-explicit-constructor)
      : tensors(tensors), free_dim(free_dim) {}
  ComparedTensors(const at::Tensor& tensor, int64_t free_dim = -1)  // NOLINT(google-explicit-constructor)
      : ComparedTensors(at::TensorList(tensor), free_dim) {}

  at::TensorList tensors;
  int64_t free_dim;
};

std::string describe_tensors(const ComparedTensors& compared);

// Raises DistBackendError unless all ranks of `group` call `op` with these arguments and tensors. The error
// names the first rank that differs from rank 0 and both calls, or the ranks that called nothing within the
// group's timeout. Calls are numbered per group, from the first checked one.
void agree(c10d::ProcessGroup& group, const char* op, const std::string& arguments,
           const std::string& tensors);

// Calls agree() if agreement is checked, with `arguments` joined by c10::str().
template <typename... Arguments>
void agree_if_checked(c10d::ProcessGroup& group, const char* op, const ComparedTensors& tensors,
                      const Arguments&... arguments) {
  if (agreement_is_checked()) {
    agree(group, op, c10::str(arguments...), describe_tensors(tensors));
  }
}

// Checks an exchange of rows of dim 0 likewise: rank r must expect from rank s what rank s sends to rank r.
void agree_on_exchange_if_checked(c10d::ProcessGroup& group, const char* op, const at::Tensor& rows,
                                  at::IntArrayRef output_splits, at::IntArrayRef input_splits);

}  // namespace funcol
