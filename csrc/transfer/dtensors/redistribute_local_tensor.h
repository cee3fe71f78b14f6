// Redistribution of a local tensor from one DTensorSpec to another.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "transfer/dtensors/transfer_cache.h"

namespace funcol::python {

struct LocalRedistribution {
  RedistributionOptions options;
  bool is_explicit = false;  // whether the program requested it, for PyTorch's DebugMode
  bool is_lenient = false;   // see redistribute_local()
};

// Redistributes `local`, the local tensor of `src_spec`, to `dst_spec`. Returns `local` on a rank outside of
// the mesh. Raises NotImplementedError for specs on different meshes, and for specs that C++ does not
// support. Raises ValueError if there is no plan, and for a local tensor of another shape than the source
// gives it; if `is_lenient` and PyTorch moves such a tensor correctly, returns null instead, with nothing
// done. Needs the GIL.
//
// PyTorch counterpart: torch.distributed.tensor._redistribute.redistribute_local_tensor.
py::object redistribute_local(py::handle local, py::handle src_spec, py::handle dst_spec,
                              const LocalRedistribution& request);

// Returns the context in which an active DebugMode of PyTorch notes operators as parts of the redistribution
// of `local`, or null if nothing observes it.
py::object debug_context(py::handle local, const SpecObjects& src, const SpecObjects& dst,
                         const Execution& execution, bool is_explicit);

// A redistribution of operands, norm partials among them.
//
// PyTorch counterpart: _NormPartial in torch.distributed.tensor._ops._math_ops.
struct OperandMove {
  ExecutionPtr execution;
  double order = 0;                   // of the source's norm, whose powers the execution sums; 0 without one
  std::vector<double> divisors = {};  // of the result, one for each axis along which a norm partial is made

  at::Tensor run(const at::Tensor& local) const;
};

// Returns the move between two specs of one mesh, of tensors whose elements have `itemsize` bytes. Returns
// nullopt if Python has to move the tensor: for specs that C++ does not support, masks, and on a rank outside
// of the mesh. Needs the GIL.
std::optional<OperandMove> move_between(py::handle src_spec, py::handle dst_spec, int64_t itemsize);

}  // namespace funcol::python
