#include "pyobjects/specs.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "layout/hash.h"
#include "planner/lru_cache.h"
#include "pyobjects/attributes.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/mesh_table.h"
#include "pyobjects/op_schemas.h"

namespace funcol::python {
namespace {

constexpr size_t kNumSpecs = 4096;

struct Key {
  uint64_t mesh;  // by number_of()
  Spec spec;
  bool strided_as_order;

  friend bool operator==(const Key&, const Key&) = default;
};

// No two meshes have the same one, even if one is gone: what is remembered under it does not keep the mesh.
uint64_t number_of(py::handle mesh) {
  static MeshTable<uint64_t> numbers;
  static uint64_t last = 0;
  const auto* const known = numbers.find(mesh);
  return known != nullptr ? *known : numbers.put(mesh, ++last);
}

struct KeyHash {
  size_t operator()(const Key& key) const {
    Hash hash;
    hash.add(key.mesh);
    hash.add(key.spec.layout);
    hash.add_all(key.spec.meta.shape);
    hash.add_all(key.spec.meta.stride);
    hash.add(static_cast<uint64_t>(key.spec.meta.dtype));
    return hash.value();
  }
};

using Specs = LruCache<Key, py::object, KeyHash>;

// Without their mesh.
Specs& specs() {
  static auto* const cache = new Specs(kNumSpecs);  // NOLINT: outlives Python
  return *cache;
}

Specs& canonical_specs() {
  static auto* const cache = new Specs(kNumSpecs);  // NOLINT: outlives Python
  return *cache;
}

py::object copy(py::handle spec, py::handle mesh) {
  auto* const type = Py_TYPE(spec.ptr());
  static auto* const no_arguments = PyTuple_New(0);
  // Without DTensorSpec's own __setattr__, which takes longer than all else here.
  auto copied = py::reinterpret_steal<py::object>(type->tp_new(type, no_arguments, nullptr));
  const auto fields = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(spec.ptr(), nullptr));
  const auto own = py::reinterpret_steal<py::object>(fields ? PyDict_Copy(fields.ptr()) : nullptr);
  if (!copied || !own || (mesh && PyDict_SetItem(own.ptr(), interned<"mesh">(), mesh.ptr()) != 0) ||
      PyObject_GenericSetDict(copied.ptr(), own.ptr(), nullptr) != 0) {
    throw py::error_already_set();
  }
  return copied;
}

py::object placement_class(const char* name) {
  return py::module::import("torch.distributed.tensor.placement_types").attr(name);
}

py::object to_python_norm(const NormOrder& order) {
  auto* const norm_partial = imported<"torch.distributed.tensor._ops._math_ops", "_NormPartial">().ptr();
  return order.is_integer ? py::handle(norm_partial)(static_cast<int64_t>(order.value))
                          : py::handle(norm_partial)(order.value);
}

py::object to_python(const Placement& placement, const MaskedPlacements& masked) {
  static auto* const replicate = placement_class("Replicate")().release().ptr();
  static auto* const shard = placement_class("Shard").release().ptr();
  static auto* const strided_shard = placement_class("_StridedShard").release().ptr();
  static auto* const partial = placement_class("Partial").release().ptr();
  if (placement.mask != 0) {
    return masked(placement);
  }
  if (placement.is_replicate()) {
    return py::reinterpret_borrow<py::object>(replicate);
  }
  if (placement.is_norm()) {
    return to_python_norm(placement.norm);
  }
  if (placement.is_partial()) {
    return py::handle(partial)(std::string(to_string(placement.op)));
  }
  if (placement.split_factor == 1) {
    return py::handle(shard)(placement.dim);
  }
  return py::handle(strided_shard)(placement.dim, py::arg("split_factor") = placement.split_factor);
}

py::tuple to_python(const ShardOrder& order) {
  py::list entries;
  for (size_t dim = 0; dim < order.size(); ++dim) {
    if (!order[dim].empty()) {
      entries.append(py::make_tuple(dim, py::tuple(py::cast(order[dim]))));
    }
  }
  return py::tuple(entries);
}

bool has_strided(const Spec& spec) {
  const auto& placements = spec.layout.placements;
  return std::ranges::any_of(
      placements, [](const auto& placement) { return placement.is_shard() && placement.split_factor != 1; });
}

bool has_masks(const Spec& spec) {
  const auto& placements = spec.layout.placements;
  return std::ranges::any_of(placements, [](const auto& placement) { return placement.mask != 0; });
}

py::object make_spec(const Spec& spec, py::handle mesh, bool strided_as_order,
                     const MaskedPlacements& masked) {
  py::tuple placements(spec.layout.placements.size());
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    placements[axis] = to_python(spec.layout.placements[axis], masked);
  }
  const auto dtype = py::reinterpret_borrow<py::object>(
      reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(spec.meta.dtype))));
  return callback(Callback::kMakeSpec)(
      mesh, placements, to_python(spec.layout.order), py::tuple(py::cast(spec.meta.shape)),
      py::tuple(py::cast(spec.meta.stride)), dtype,
      has_strided(spec) ? py::object(py::bool_(strided_as_order)) : py::none());
}

}  // namespace

py::object copy_spec(py::handle spec) { return copy(spec, {}); }

py::object copy_without_mesh(py::handle spec) { return copy(spec, py::none()); }

py::object copy_onto(py::handle spec, py::handle mesh) { return copy(spec, mesh); }

py::object to_python_spec(const Spec& spec, py::handle mesh, bool strided_as_order,
                          const MaskedPlacements& masked) {
  if (has_masks(spec)) {
    return make_spec(spec, mesh, strided_as_order, masked);
  }
  Key key{number_of(mesh), spec, strided_as_order && has_strided(spec)};
  if (const auto* known = specs().get(key)) {
    return copy_onto(*known, mesh);
  }
  auto made = make_spec(spec, mesh, strided_as_order, masked);
  PyObject_Hash(made.ptr());  // which its copies have from it
  specs().put(std::move(key), copy_without_mesh(made));
  return made;
}

py::object canonical_spec(py::handle spec) {
  auto value = read_spec(spec);
  TORCH_CHECK_NOT_IMPLEMENTED(!has_masks(value), "funcol: a spec with masks, which is like no other: ",
                              std::string(py::str(spec)), ".");
  const bool strided_as_order = has_strided(value) && stands_for_order(spec);
  Key key{number_of(attribute<"mesh">(spec)), std::move(value), strided_as_order};
  if (const auto* known = canonical_specs().get(key)) {
    return *known;
  }
  auto made = copy_spec(spec);
  canonical_specs().put(std::move(key), made);
  return made;
}

void forget_specs() {
  specs().clear();
  canonical_specs().clear();
}

}  // namespace funcol::python
