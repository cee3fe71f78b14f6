#include "pyobjects/dtensors.h"

#include <c10/util/Exception.h>

#include <utility>

#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "pyobjects/specs.h"

namespace funcol::python {

PyTypeObject* dtensor_type() {
  auto* const type = imported<"torch.distributed.tensor", "DTensor">().ptr();
  return reinterpret_cast<PyTypeObject*>(type);
}

py::object make_dtensor(PyObject* local, py::handle spec, bool requires_grad) {
  static auto* const type = reinterpret_cast<PyObject*>(dtensor_type());
  static auto* const make = PyObject_GetAttrString(type, "__new__");
  static auto* const names = py::make_tuple("requires_grad").release().ptr();
  PyObject* const arguments[] = {type, local, spec.ptr(), requires_grad ? Py_True : Py_False};
  return checked(PyObject_Vectorcall(make, arguments, 3, names));
}

bool observes_redistribution() {
  const auto context = imported<"torch.distributed.tensor._utils", "ExplicitRedistributionContext">();
  static auto* const of_thread = attribute<"_local">(context).release().ptr();
  // In its dict: asking for a missing attribute would make an error each time.
  const auto here = attribute<"__dict__">(of_thread);
  auto* const active = PyDict_GetItemWithError(here.ptr(), interned<"_active">());
  return active != nullptr && active != Py_None;
}

std::optional<std::vector<Placement>> known_placements(py::handle sequence, size_t num_axes,
                                                       int64_t num_dims) {
  if (!PyTuple_Check(sequence.ptr()) && !PyList_Check(sequence.ptr())) {
    return std::nullopt;
  }
  std::vector<Placement> placements;
  try {
    placements = to_placements(sequence);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  if (placements.size() != num_axes) {
    return std::nullopt;
  }
  const Placement* partial = nullptr;
  for (auto& placement : placements) {
    if (placement.is_shard() && placement.dim < 0 && placement.dim + num_dims >= 0) {
      placement.dim += num_dims;
    }
    if (placement.is_partial()) {
      if (placement.mask != 0 || (partial != nullptr && *partial != placement)) {
        return std::nullopt;
      }
      partial = &placement;
    }
  }
  return placements;
}

py::object new_spec(py::handle device_mesh, const std::vector<Placement>& placements, TensorMeta meta) {
  return to_python_spec({std::move(meta), {placements, default_shard_order(placements)}}, device_mesh,
                        /*strided_as_order=*/true, nullptr);
}

}  // namespace funcol::python
