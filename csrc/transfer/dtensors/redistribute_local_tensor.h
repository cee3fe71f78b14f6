// Redistribution of a local tensor from one DTensorSpec to another.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "transfer/dtensors/transfer_cache.h"

namespace funcol::python {

struct LocalRedistribution {
  RedistributionOptions options;
  bool is_explicit = false;  // whether the program asked for it, for PyTorch's DebugMode
  bool is_lenient = false;   // see redistribute_local()
};

// Redistributes `local`, the local tensor of `src_spec`, to `dst_spec`; on a rank outside of the mesh it
// stays the same object. NotImplementedError for specs on different meshes, and for specs that C++ has no
// values for. ValueError if there is no plan, and for a local tensor of another shape than the source gives
// it; if `is_lenient` and PyTorch moves such a tensor correctly, null instead, with nothing done. Needs the
// GIL.
//
// PyTorch counterpart: torch.distributed.tensor._redistribute.redistribute_local_tensor.
py::object redistribute_local(py::handle local, py::handle src_spec, py::handle dst_spec,
                              const LocalRedistribution& how);

// Returns the context in which an active DebugMode of PyTorch notes operators as parts of the redistribution
// of `local`; null if nothing observes it.
py::object debug_context(py::handle local, const SpecObjects& src, const SpecObjects& dst,
                         const Execution& execution, bool is_explicit);

// The execution of the redistribution between two specs of one mesh, of tensors whose elements have
// `itemsize` bytes. Null where Python has to move the tensor: for specs that C++ has no values for, and
// masks. Needs the GIL.
ExecutionPtr execution_between(py::handle src_spec, py::handle dst_spec, int64_t itemsize);

}  // namespace funcol::python
