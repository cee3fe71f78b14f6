#include "pyobjects/dtensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>
#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>

#include "compat/wrapper_object.h"
#include "pyobjects/attributes.h"
#include "pyobjects/layouts.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"

namespace funcol::python {
namespace {

Py_ssize_t slot_offset(PyObject* name) {
  const auto descriptor = checked(PyObject_GetAttr(reinterpret_cast<PyObject*>(dtensor_type()), name));
  TORCH_CHECK(Py_IS_TYPE(descriptor.ptr(), &PyMemberDescr_Type), "funcol: DTensor has no slot ",
              py::handle(name).cast<std::string>(), " in this PyTorch.");
  return reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member->offset;  // NOLINT
}

template <AttributeName name>
PyObject*& slot(PyObject* object) {
  static const auto offset = slot_offset(interned<name>());
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);  // NOLINT
}

// Returns a tensor whose storage holds no memory, and only shows which wrappers are views of each other.
at::Tensor make_wrapper(const at::Tensor& local, const Geometry& geometry) {
  const auto offset = local.storage_offset();
  const auto bytes =
      at::detail::computeStorageNbytes(geometry.sizes(), geometry.strides(), local.itemsize(), offset);
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes),
                       at::DataPtr(nullptr, local.device()), c10::GetAllocator(c10::kMeta),
                       /*resizable=*/true);
  constexpr c10::DispatchKeySet kLazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  const auto keys = c10::DispatchKeySet(local.options().computeDispatchKey()) | (local.key_set() & kLazy);
  auto wrapper = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, local.dtype());
  wrapper.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes(), geometry.strides(), offset);
  return wrapper;
}

}  // namespace

PyObject* spec_of(PyObject* dtensor) { return slot<"_spec">(dtensor); }

PyObject* local_of(PyObject* dtensor) { return slot<"_local_tensor">(dtensor); }

PyObject* dtensor_object(const at::Tensor& tensor) {
  const auto object = to_python(tensor);
  return Py_TYPE(object.ptr()) == dtensor_type() ? object.ptr() : nullptr;
}

const at::Tensor& local_of(const at::Tensor& dtensor) {
  return THPVariable_Unpack(local_of(dtensor_object(dtensor)));
}

void set_spec(PyObject* dtensor, py::object spec) {
  const auto before =
      py::reinterpret_steal<py::object>(std::exchange(slot<"_spec">(dtensor), spec.release().ptr()));
}

at::Tensor make_dtensor(at::Tensor local, py::handle spec, const Geometry& geometry, bool requires_grad) {
  static auto* const type = dtensor_type();
  at::Tensor wrapper;
  py::object object = py::none();
  if (!requires_grad && local.layout() == at::kStrided) {
    wrapper = make_wrapper(local, geometry);
    object = checked(compat::wrapper_object(wrapper, type));
  }
  if (object.is_none()) {
    const auto of_local = to_python(std::move(local));
    return THPVariable_Unpack(make_dtensor(of_local.ptr(), spec, requires_grad).ptr());
  }
  slot<"_spec">(object.ptr()) = spec.inc_ref().ptr();
  slot<"_local_tensor">(object.ptr()) = to_python(std::move(local)).release().ptr();
  return wrapper;
}

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
  // Reads its dict, since getting a missing attribute would make an error each time.
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
