// A reference to a process group.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace funcol {

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

}  // namespace funcol
