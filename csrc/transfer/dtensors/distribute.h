// Distributes a whole tensor: makes it a DTensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>

namespace funcol::python {

// The DTensor of `tensor`, a leaf on the mesh's device. `placements`: a sequence, or None to replicate.
// `source`: the rank of the mesh whose data counts; none: each rank's own data. Null, with nothing done,
// where PyTorch's own function has to run. Needs the GIL.
//
// PyTorch counterpart: torch.distributed.tensor.distribute_tensor.
py::object distribute_tensor(const at::Tensor& tensor, py::handle device_mesh, py::handle placements,
                             std::optional<int64_t> source);

}  // namespace funcol::python
