// Functions of funcol's Python side that C++ calls.
//
// C++ imports none of funcol's Python modules: each module hands its functions over when it is loaded.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace funcol::python {

enum class Callback {
  kMeshAxes,                 // sizes and names of a DeviceMesh's axes, and their groups
  kMakeSpec,                 // a DTensorSpec of its parts
  kRedistributionTarget,     // the DTensorSpec that placements lead to
  kAxisGroup,                // the process group along axes of a mesh
  kNoteRedistribution,       // a context in which PyTorch's DebugMode notes a redistribution
  kApplyMask,                // a mask partial applied to a local tensor
  kFillMask,                 // a local tensor of a mask partial made
  kRedistributeLocalTensor,  // for specs that have no values here
  kGradientOfToLocal,        // gradients of DTensor's methods, for what is not served here
  kGradientOfFromLocal,
  kGradientOfRedistribute,
};

// RuntimeError naming the function if the module that has it is not loaded.
py::handle callback(Callback which);

// `name` as in _C.pyi; ValueError for another one. Kept for ever, in the place of one that was handed over
// before.
void hand_over(const std::string& name, const py::object& function);

}  // namespace funcol::python
