// Distributes a full tensor: makes it a DTensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>

namespace funcol::python {

// Returns the DTensor of `tensor`, a leaf on the mesh's device. `placements` is a sequence, or None to
// replicate. `source` is the rank of each axis's group whose data counts, or nullopt for each rank's own
// data. Returns null, with nothing done, if PyTorch's own function has to run. Needs the GIL.
//
// PyTorch counterpart: torch.distributed.tensor.distribute_tensor.
py::object distribute_tensor(const at::Tensor& tensor, py::handle device_mesh, py::handle placements,
                             std::optional<int64_t> source);

}  // namespace funcol::python
