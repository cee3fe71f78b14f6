// Checks that the ranks of a group are about to run the same collective.
//
// When ranks call different collectives, or the same with different shapes, most backends hang, and some
// return wrong data. While agreement is checked, each call first publishes its description in the group's
// store and reads those of the other ranks; if they differ, every rank raises and nothing is sent. Meant for
// finding a fault: a call costs several round trips to the store, and waits for all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "comm/group_ptr.h"

namespace funcol {

// Begins or ends checking, for all threads of this process; calls nest.
void check_agreement(bool begin);

bool agreement_is_checked();

// Describes what must be equal on all ranks: dtypes, devices and sizes, except sizes along `free_dim`.
std::string describe_tensors(at::TensorList tensors, int64_t free_dim = -1);

// Raises DistBackendError unless all ranks of `group` call `op` with these arguments and tensors. The error
// names the first rank that differs from rank 0 and both calls, or the ranks that called nothing within the
// group's timeout. Calls are numbered per group, from the first checked one.
void agree(c10d::ProcessGroup& group, const char* op, const std::string& arguments,
           const std::string& tensors);

// The same for an exchange: rank r must expect from rank s what rank s sends to rank r.
void agree_on_exchange(c10d::ProcessGroup& group, const char* op, const std::string& tensors,
                       at::IntArrayRef output_splits, at::IntArrayRef input_splits);

}  // namespace funcol
