// What FSDP2 does for a group of parameters from one hook to the next, each in one call.
//
// Everything here needs the GIL. All give null, with nothing done, for what PyTorch's own function has to do
// (see fsdp/objects.h), else None unless noted.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace funcol::python {

// FSDPParamGroup.pre_forward: whether the group had not begun its forward pass.
py::object pre_forward(py::handle fsdp_group);
py::object post_forward(py::handle fsdp_group);

// `prefetches`: whether the gather of the group before is started.
py::object pre_backward(py::handle fsdp_group, py::handle prefetches);
py::object post_backward(py::handle fsdp_group);  // in reduction.cpp

py::object unshard_group(py::handle fsdp_group, py::handle is_async);
py::object wait_for_unshard_group(py::handle fsdp_group);

}  // namespace funcol::python
