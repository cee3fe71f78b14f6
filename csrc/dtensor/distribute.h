// A whole tensor made a DTensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>

namespace funcol::python {

// `tensor`, a leaf on the mesh's device, by `placements`, a sequence, or None for Replicate alone. `source`
// is the rank of the mesh whose data counts; none: each rank's own. Null, with nothing done, for what
// PyTorch's own function has to do. Needs the GIL.
//
// PyTorch counterpart: torch.distributed.tensor.distribute_tensor.
py::object distribute_tensor(const at::Tensor& tensor, py::handle device_mesh, py::handle placements,
                             std::optional<int64_t> source);

}  // namespace funcol::python
