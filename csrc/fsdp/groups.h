// Methods of FSDPParamGroup that FSDP2's hooks call, each in one call of C++.
//
// Everything here needs the GIL. All return null, with nothing done, where PyTorch's own function has to run
// (see fsdp/param_group_view.h), else None unless noted.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "fsdp/param_group_view.h"

namespace funcol::python {

// Raises ValueError naming `fully_shard` if the process group of an FSDPParamGroup was aborted or
// reconfigured after the mesh that it shards over was made.
void check_is_current(py::handle mesh_info, const c10::intrusive_ptr<c10d::ProcessGroup>& group);

// Returns the purpose of collectives for the group's parameters: "parameters of layers.0". Returns an empty
// string unless purposes are read.
std::string purpose_of(const Fields& group);

// Returns True if the group had not begun its forward pass, else False.
py::object fsdp_pre_forward(py::handle fsdp_group);
py::object fsdp_post_forward(py::handle fsdp_group);

// Replaces FSDPParamGroup.pre_backward. If `prefetches`, starts the gather of the group whose backward pass
// comes next.
py::object fsdp_pre_backward(py::handle fsdp_group, py::handle prefetches);
py::object fsdp_post_backward(py::handle fsdp_group);  // in reduction.cpp

py::object fsdp_unshard(py::handle fsdp_group, py::handle is_async);
py::object fsdp_wait_for_unshard(py::handle fsdp_group);

}  // namespace funcol::python
