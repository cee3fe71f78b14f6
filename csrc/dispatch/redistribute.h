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

// Where a DTensor goes.
struct RedistributionTarget {
  py::object placements;  // a tuple or list, one for each axis of the mesh
  // A shard order; None: the order of the mesh. Ellipsis, for DTensor.redistribute: the order of the mesh,
  // but equal placements move nothing.
  py::object order = py::none();
  std::optional<at::ScalarType> sent_dtype = std::nullopt;    // none: that of the local tensor
  std::optional<at::ScalarType> result_dtype = std::nullopt;  // none: that of the local tensor
  // In which the gradient is sent; none: that of the local tensor.
  std::optional<at::ScalarType> gradient_dtype = std::nullopt;
};

// If placements and dtypes stay the same, so does the local tensor. ValueError as in funcol.redistribute().
// Null, with nothing done, for DTensors and arguments that C++ does not serve (see supported_dtensor.h), and
// for a local tensor of another shape than its spec gives this rank. Needs the GIL.
py::object redistribute(py::handle dtensor, const RedistributionTarget& target,
                        const RedistributionOptions& options = {});

// The local tensor of redistribute() for a DTensor of `local`, without a DTensor around it and without a node
// of autograd.
std::optional<at::Tensor> redistributed_local(const at::Tensor& local, py::handle spec,
                                              const RedistributionTarget& target);

}  // namespace funcol::python
