// Methods of FSDPParamGroup that FSDP2's hooks call, each in one call of C++.
//
// Everything here needs the GIL. All return null, with nothing done, where PyTorch's own function has to run
// (see fsdp/objects.h), else None unless noted.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace funcol::python {

// Returns whether the group had not begun its forward pass.
py::object pre_forward(py::handle fsdp_group);
py::object post_forward(py::handle fsdp_group);

// `prefetches`: whether to start the gather of the group whose backward pass comes next.
py::object pre_backward(py::handle fsdp_group, py::handle prefetches);
py::object post_backward(py::handle fsdp_group);  // in reduction.cpp

py::object unshard_group(py::handle fsdp_group, py::handle is_async);
py::object wait_for_unshard_group(py::handle fsdp_group);

}  // namespace funcol::python
