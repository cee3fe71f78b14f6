// Functions of funcol's Python side that C++ calls.
//
// C++ imports none of funcol's Python modules: each module hands its functions over when it is loaded.
// python/funcol/_C/callbacks.pyi has their types, at hand_over().
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace funcol::python {

enum class Callback {
  kMeshAxes,              // sizes and names of a DeviceMesh's axes, and their groups
  kMakeSpec,              // a DTensorSpec of its parts
  kRedistributionTarget,  // the DTensorSpec that placements lead to
  kAxisGroup,             // the process group along axes of a mesh
  kRanksOfMesh,           // the default group, and the mesh's ranks in it
  kNoteRedistribution,    // a context in which PyTorch's DebugMode notes a redistribution
  kApplyMask,             // a mask partial applied to a local tensor
  kFillMask,              // a local tensor of a mask partial made
  kGradientOfToLocal,     // gradients of DTensor's methods, where C++ does not serve them
  kGradientOfFromLocal,
  kGradientOfRedistribute,
  kMeshPair,  // ranks of two meshes, and a process group of all of them
};

// RuntimeError naming the function if the module that has it is not loaded.
py::handle callback(Callback which);

// Sets the function of `name`, a name in _C/callbacks.pyi; ValueError for other names. The function is kept
// until another one takes its place.
void hand_over(const std::string& name, const py::object& function);

}  // namespace funcol::python
