// distribute_tensor for Python.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/dtensor_objects.h"
#include "bindings/fast_functions.h"
#include "bindings/redistribution_specs.h"
#include "bindings/without_gil.h"
#include "redistribute/distribute.h"
#include "sharding/output_metas.h"

namespace funcol::python {
namespace {

constexpr auto kOp = "distribute_tensor";

std::vector<GroupOfAxis> groups_of_axes(py::handle device_mesh, KnownMesh& known) {
  std::vector<GroupOfAxis> groups;
  for (int64_t axis = 0; axis < known.mesh.num_axes(); ++axis) {
    const auto& group = find_group(axis_set(axis), device_mesh, known);
    groups.push_back({group_from_ivalue(group.group, kOp), group.members});
  }
  return groups;
}

// (tensor, mesh, placements or None, src_data_rank or None); the tensor is a leaf on the mesh's device.
PyObject* distribute_tensor(PyObject* /*module*/, Args args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count(count, 4, kOp);
  const py::handle device_mesh = args[1];
  const auto& tensor = THPVariable_Unpack(args[0]);
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.layout() != at::kStrided) {
    return not_implemented();
  }
  auto& known = known_mesh(device_mesh);
  const auto num_axes = known.mesh.sizes.size();
  auto placements = args[2] == Py_None ? std::optional(std::vector<Placement>(num_axes))
                                       : known_placements(args[2], num_axes, tensor.dim());
  if (!known.coordinate.has_value() || !placements.has_value()) {
    return not_implemented();
  }
  Distribution how{*std::move(placements), known.mesh, *known.coordinate, {}};
  if (args[3] != Py_None) {
    how.source = int_argument(args[3], "src_data_rank", kOp);
  }
  check(how, tensor);
  std::vector<GroupOfAxis> groups;
  if (how.communicates() && !tensor.is_meta()) {
    groups = groups_of_axes(device_mesh, known);
  }
  const auto spec = interned_spec(device_mesh, how.placements, look_of(tensor));
  const auto whole = tensor.detach();
  at::Tensor local;
  {
    const WithoutGil no_gil;
    local = distribute(whole, how, groups);
    local.set_requires_grad(tensor.requires_grad());
  }
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(local)));
  return make_dtensor(object.ptr(), spec, tensor.requires_grad()).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace

void bind_distribute(PyObject* module) {
  static PyMethodDef functions[] = {fast<distribute_tensor>("distribute_tensor"),
                                    {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module, functions) != 0) {
    throw python_error();
  }
}

}  // namespace funcol::python
