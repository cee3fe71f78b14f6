// DTensor's redistribution, differentiable any number of times: the gradient is a redistribution back.
//
// PyTorch counterpart: DTensor.redistribute.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "dispatch/supported_dtensor.h"
#include "transfer/dtensors/transfer_cache.h"

namespace funcol::python {

// The target of a redistribution.
struct RedistributionTarget {
  py::object placements;  // a tuple or list, one for each axis of the mesh
  // A shard order; None: the order of the mesh. Ellipsis, for DTensor.redistribute: the order of the mesh,
  // but equal placements move nothing.
  py::object order = py::none();
  std::optional<at::ScalarType> sent_dtype = std::nullopt;    // none: that of the local tensor
  std::optional<at::ScalarType> result_dtype = std::nullopt;  // none: that of the local tensor
  // The dtype in which the gradient is sent; none: that of the local tensor.
  std::optional<at::ScalarType> gradient_dtype = std::nullopt;
};

// Redistributes a DTensor. Keeps the local tensor if placements and dtypes stay the same. Raises ValueError
// as in funcol.redistribute(). Returns null, with nothing done, for DTensors and arguments that C++ does not
// support (see supported_dtensor.h), and for a local tensor whose shape differs from its spec's on this rank.
// Needs the GIL.
py::object redistribute(py::handle dtensor, const RedistributionTarget& target,
                        const RedistributionOptions& options = {});

// Returns the local tensor of redistribute() for a DTensor of `local`, without making a DTensor or an
// autograd node. Returns nullopt, with nothing done, if C++ does not support the redistribution.
std::optional<at::Tensor> redistributed_local(const at::Tensor& local, py::handle spec,
                                              const RedistributionTarget& target);

}  // namespace funcol::python
