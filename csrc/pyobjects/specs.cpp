#include "pyobjects/specs.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "compat/dtensor_spec.h"
#include "layout/cache.h"
#include "layout/hash.h"
#include "planner/lru_cache.h"
#include "pyobjects/attributes.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/dtypes.h"
#include "pyobjects/layouts.h"
#include "pyobjects/mesh_table.h"
#include "pyobjects/op_schemas.h"

namespace funcol::python {
namespace {

constexpr size_t kNumSpecs = 4096;
constexpr size_t kMostNumbers = 32768;

struct Key {
  uint64_t mesh;  // by number_of()
  Spec spec;
  bool strided_as_order;

  size_t hash() const {
    Hash hash;
    hash.add(mesh);
    hash.add(spec.layout);
    hash.add_all(spec.meta.shape);
    hash.add_all(spec.meta.stride);
    hash.add(static_cast<uint64_t>(spec.meta.dtype));
    return hash.value();
  }
  friend bool operator==(const Key&, const Key&) = default;
};

// Unlike an address, a number never comes again: a key does not keep its mesh alive.
uint64_t number_of(py::handle mesh) {
  static MeshTable<uint64_t> numbers;
  static uint64_t last = 0;
  const auto* const known = numbers.find(mesh);
  return known != nullptr ? *known : numbers.put(mesh, ++last);
}

Key key_of(py::handle spec, Spec value) {
  const bool strided_as_order =
      has_strided_shards(value.layout) && compat::strided_shards_stand_for_order(spec);
  return {number_of(attribute<"mesh">(spec)), std::move(value), strided_as_order};
}

bool has_norms(py::handle spec) {
  const auto placements = attribute<"placements">(spec).cast<py::tuple>();
  return std::any_of(placements.begin(), placements.end(), [](py::handle one) { return is_norm(one); });
}

using Specs = LruCache<Key, py::object>;

// Of specs without their mesh.
Specs& specs() {
  static auto* const cache = new Specs(kNumSpecs);  // NOLINT: outlives Python
  return *cache;
}

Specs& canonical_specs() {
  static auto* const cache = new Specs(kNumSpecs);  // NOLINT: outlives Python
  return *cache;
}

using Numbers = Cache<Key, uint64_t, KeyHash>;

Numbers& value_numbers() {
  static auto* const numbers = new Numbers(kMostNumbers);  // NOLINT: outlives Python
  return *numbers;
}

// Gives a new object its __dict__, without the class's own __setattr__.
int set_dict(PyObject* object, PyObject* dict) {
#if PY_VERSION_HEX >= 0x030D0000
  // Since 3.13 attributes lie in the object, and PyObject_GenericSetDict() leaves those there in force.
  return PyObject_GenericSetAttr(object, interned<"__dict__">(), dict);
#else
  return PyObject_GenericSetDict(object, dict, nullptr);
#endif
}

py::object copy(py::handle spec, py::handle mesh) {
  auto* const type = Py_TYPE(spec.ptr());
  static auto* const no_arguments = PyTuple_New(0);
  // Without DTensorSpec's own __setattr__, which takes longer than the rest.
  auto copied = checked(type->tp_new(type, no_arguments, nullptr));
  const auto fields = checked(PyObject_GenericGetDict(spec.ptr(), nullptr));
  const auto own = checked(PyDict_Copy(fields.ptr()));
  if ((mesh && PyDict_SetItem(own.ptr(), interned<"mesh">(), mesh.ptr()) != 0) ||
      set_dict(copied.ptr(), own.ptr()) != 0) {
    throw py::error_already_set();
  }
  return copied;
}

py::object to_python_norm(const NormOrder& order) {
  const auto norm_partial = imported<"torch.distributed.tensor._ops._math_ops", "_NormPartial">();
  return order.is_integer ? norm_partial(static_cast<int64_t>(order.value)) : norm_partial(order.value);
}

py::object to_python_placement(const Placement& placement, const MaskedPlacements& masked) {
  if (placement.mask != 0) {
    return masked(placement);
  }
  if (placement.is_replicate()) {
    return replicate();
  }
  if (placement.is_norm()) {
    return to_python_norm(placement.norm);
  }
  if (placement.is_partial()) {
    return imported<kPlacementTypes, "Partial">()(std::string(to_string(placement.op)));
  }
  if (!placement.is_strided()) {
    return imported<kPlacementTypes, "Shard">()(placement.dim);
  }
  return imported<kPlacementTypes, "_StridedShard">()(placement.dim,
                                                      py::arg("split_factor") = placement.split_factor);
}

py::tuple to_python_order(const ShardOrder& order) {
  py::list entries;
  for (size_t dim = 0; dim < order.size(); ++dim) {
    if (!order[dim].empty()) {
      entries.append(py::make_tuple(dim, py::tuple(py::cast(order[dim]))));
    }
  }
  return py::tuple(entries);
}

py::object make_spec(const Spec& spec, py::handle mesh, bool strided_as_order,
                     const MaskedPlacements& masked) {
  py::tuple placements(spec.layout.placements.size());
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    placements[axis] = to_python_placement(spec.layout.placements[axis], masked);
  }
  return callback(Callback::kMakeSpec)(
      mesh, placements, to_python_order(spec.layout.order), py::tuple(py::cast(spec.meta.shape)),
      py::tuple(py::cast(spec.meta.stride)), to_python(static_cast<at::ScalarType>(spec.meta.dtype)),
      has_strided_shards(spec.layout) ? py::object(py::bool_(strided_as_order)) : py::none());
}

}  // namespace

py::object copy_spec(py::handle spec) { return copy(spec, {}); }

py::object copy_without_mesh(py::handle spec) {
  if (PyObject_Hash(spec.ptr()) == -1) {  // the spec keeps its hash, so that copies have it
    PyErr_Clear();
  }
  return copy(spec, py::none());
}

py::object copy_onto(py::handle spec, py::handle mesh) { return copy(spec, mesh); }

py::object to_python_spec(const Spec& spec, py::handle mesh, bool strided_as_order,
                          const MaskedPlacements& masked) {
  if (has_masks(spec.layout)) {
    return make_spec(spec, mesh, strided_as_order, masked);
  }
  Key key{number_of(mesh), spec, strided_as_order && has_strided_shards(spec.layout)};
  if (const auto* known = specs().get(key)) {
    return copy_onto(*known, mesh);
  }
  auto made = make_spec(spec, mesh, strided_as_order, masked);
  specs().put(std::move(key), copy_without_mesh(made));
  return made;
}

py::object canonical_spec(py::handle spec) {
  auto value = read_spec(spec);
  TORCH_CHECK_NOT_IMPLEMENTED(!has_masks(value.layout),
                              "funcol: a spec with masks equals no other: ", std::string(py::str(spec)), ".");
  auto key = key_of(spec, std::move(value));
  if (const auto* known = canonical_specs().get(key)) {
    return *known;
  }
  auto made = copy_spec(spec);
  canonical_specs().put(std::move(key), made);
  return made;
}

uint64_t value_number(py::handle spec) {
  static uint64_t last = 0;
  auto value = has_norms(spec) ? read_spec_as_pytorch(spec) : read_spec(spec);
  if (has_masks(value.layout)) {
    return 0;
  }
  auto key = key_of(spec, std::move(value));
  if (const auto known = value_numbers().get(key)) {
    return *known;
  }
  value_numbers().put(std::move(key), ++last);
  return last;
}

void forget_specs() {
  specs().clear();
  canonical_specs().clear();
  value_numbers().clear();  // a number is never given again: where one is still kept, it finds nothing
}

size_t num_specs() { return specs().size() + canonical_specs().size() + value_numbers().size(); }

py::object replicate() {
  static auto* const placement = imported<kPlacementTypes, "Replicate">()().release().ptr();
  return py::reinterpret_borrow<py::object>(placement);
}

}  // namespace funcol::python
