// A description of a collective that has been started and may still be running.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/call_site.h"
#include "comm/group_ref.h"

namespace funcol {

struct InFlight {
  InFlight() = default;
  // Of the results `outputs`.
  InFlight(std::string_view op, GroupRef group, at::TensorList outputs, CallSite started);

  // Waits for no lock of a device and for no GIL.
  std::string text() const;

  std::string_view op;  // lives for ever
  GroupRef group;
  std::vector<std::vector<int64_t>> shapes;
  std::optional<at::ScalarType> dtype;  // of the first result
  bool is_on_cpu = true;
  CallSite started;
};

// " (rank 1 of 2)"; nothing for groups that are gone, or written in Python.
std::string own_rank_text(const GroupRef& group);

}  // namespace funcol
