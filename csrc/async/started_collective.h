// A collective that a backend has begun, with all that it takes to wait for it and to make its results.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <string_view>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/group_ref.h"

namespace funcol {

struct StartedCollective {
  std::string_view op;                  // for error messages: "all_reduce"; never destroyed
  GroupRef group;                       // for error messages, and to know whether it was destroyed
  c10::intrusive_ptr<c10d::Work> work;  // null: nothing to wait for
  // Everything that the Work and the epilogue read or write. The epilogue reads the last buffer alone.
  std::vector<at::Tensor> buffers;
  std::vector<at::Tensor> outputs;  // what the caller gets
  // The last step, or empty. It runs once, after the Work, below autograd, on this StartedCollective.
  std::function<void(const StartedCollective&)> epilogue;
  bool is_counted =
      true;  // in unwaited_collectives(); false if it is waited for at once, or counted elsewhere
  // PyTorch's registry keeps Work and tensors until they are waited for: releasing ours would free nothing.
  bool is_kept_by_registry = false;
};

}  // namespace funcol
