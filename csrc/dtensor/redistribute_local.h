// Redistribution of a local tensor from one DTensorSpec to another.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "dtensor/redistributions.h"

namespace funcol::python {

struct LocalRedistribution {
  RedistributionOptions options;
  bool is_explicit = false;  // whether the program asked for it, for PyTorch's DebugMode
  bool is_lenient = false;   // see below
};

// The local tensor of `dst_spec`, where `local` is that of `src_spec`; the same object on a rank outside of
// the mesh. NotImplementedError for specs on different meshes or without values; ValueError if there is no
// plan, or for a local tensor of another shape than the source gives it. Null in place of the latter, with
// nothing done, if `is_lenient` and PyTorch moves such a tensor rightly. Needs the GIL.
//
// PyTorch counterpart: torch.distributed.tensor._redistribute.redistribute_local_tensor.
py::object redistribute_local(py::handle local, py::handle src_spec, py::handle dst_spec,
                              const LocalRedistribution& how);

}  // namespace funcol::python
