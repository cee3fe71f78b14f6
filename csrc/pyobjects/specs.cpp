#include "pyobjects/specs.h"

#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Size.h>

#include <algorithm>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "compat/dtensor_spec.h"
#include "layout/cache.h"
#include "layout/word_key.h"
#include "pyobjects/attributes.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/layouts.h"
#include "pyobjects/mesh_table.h"
#include "pyobjects/op_schemas.h"
#include "pyobjects/tensors.h"

namespace funcol::python {
namespace {

struct SpecKey : WordKey {
  SpecKey(uint64_t mesh_id, const Spec& spec, bool strided_as_order) {
    words.reserve(8 + 2 * spec.meta.shape.size() + 2 * spec.layout.placements.size());
    add(mesh_id << 1 | (strided_as_order ? 1 : 0));
    add(spec.meta);
    add(spec.layout);
  }

  bool is_on(uint64_t mesh_id) const { return words[0] >> 1 == mesh_id; }
  friend bool operator==(const SpecKey&, const SpecKey&) = default;
};

uint64_t id_of_mesh(py::handle mesh) {
  static auto* const ids = new MeshTable<uint64_t>([](const uint64_t& id) { forget_mesh(id); });  // NOLINT
  const auto* const known = ids->find(mesh);
  return known != nullptr ? *known : ids->insert_or_assign(mesh, new_mesh_id());
}

Cache<SpecKey, SharedSpecPtr>& specs() {
  static auto* const cache = new Cache<SpecKey, SharedSpecPtr>(find_table("specs"));  // NOLINT
  return *cache;
}

uint64_t num_shared_specs = 0;  // ever made

// Returns the shared specs by the objects in their `hashes_`, which they own.
ska::flat_hash_map<PyObject*, const SharedSpec*>& by_hash() {
  static auto* const specs = new ska::flat_hash_map<PyObject*, const SharedSpec*>;  // NOLINT
  return *specs;
}

bool has_norms(py::handle spec) {
  const auto placements = attribute<"placements">(spec).cast<py::tuple>();
  return std::any_of(placements.begin(), placements.end(), [](py::handle one) { return is_norm(one); });
}

// Gives a new object its __dict__, without the class's own __setattr__.
int set_dict(PyObject* object, PyObject* dict) {
#if PY_VERSION_HEX >= 0x030D0000
  // Since 3.13 attributes are stored inline, and PyObject_GenericSetDict() leaves those in force.
  return PyObject_GenericSetAttr(object, interned<"__dict__">(), dict);
#else
  return PyObject_GenericSetDict(object, dict, nullptr);
#endif
}

using Field = std::pair<PyObject*, py::handle>;

// Returns a copy with other values of some fields.
py::object copy(py::handle spec, std::initializer_list<Field> changed) {
  auto* const type = Py_TYPE(spec.ptr());
  static auto* const no_arguments = PyTuple_New(0);
  // Bypasses DTensorSpec's own __setattr__, which takes longer than the rest.
  auto copied = checked(type->tp_new(type, no_arguments, nullptr));
  const auto fields = checked(PyObject_GenericGetDict(spec.ptr(), nullptr));
  const auto own = checked(PyDict_Copy(fields.ptr()));
  for (const auto& [name, value] : changed) {
    if (PyDict_SetItem(own.ptr(), name, value.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  if (set_dict(copied.ptr(), own.ptr()) != 0) {
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
  return callback("make_spec")(mesh, placements, to_python_order(spec.layout.order),
                               py::tuple(py::cast(spec.meta.shape)), py::tuple(py::cast(spec.meta.stride)),
                               to_python(static_cast<at::ScalarType>(spec.meta.dtype)),
                               strided_as_order && has_strided_shards(spec.layout));
}

// Returns the object that a spec keeps as its hash; null if it keeps none.
py::object cached_hash(PyObject* spec) {
  auto hash = find_attribute<"_hash">(spec);
  return hash && PyLong_CheckExact(hash.ptr()) ? hash : py::object();
}

const SharedSpec* find_by_hash(PyObject* spec) {
  const auto hash = cached_hash(spec);
  const auto found = hash ? by_hash().find(hash.ptr()) : by_hash().end();
  return found != by_hash().end() ? found->second : nullptr;
}

// Sets a field without DTensorSpec's own __setattr__, which drops the hash.
template <AttributeName name>
void set_field(PyObject* spec, py::handle value) {
  const auto fields = checked(PyObject_GenericGetDict(spec, nullptr));
  if (PyDict_SetItem(fields.ptr(), interned<name>(), value.ptr()) != 0) {
    throw py::error_already_set();
  }
}

bool have_equal_items(const py::tuple& one, const py::tuple& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(), [](py::handle a, py::handle b) {
    return Py_TYPE(a.ptr()) == Py_TYPE(b.ptr()) && PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ) == 1;
  });
}

// Returns the specs without mesh and tensor_meta, one for each layout.
std::map<std::vector<uint64_t>, py::object>& specs_of_layouts() {
  constexpr size_t kMostLayouts = 4096;
  static auto* const known = new std::map<std::vector<uint64_t>, py::object>;  // NOLINT: outlives Python
  if (known->size() >= kMostLayouts) {
    const auto gone = std::exchange(*known, {});
  }
  return *known;
}

std::vector<uint64_t> words_of(const Layout& layout, bool strided_as_order) {
  WordKey key{{strided_as_order ? 1U : 0U}};
  key.add(layout);
  return std::move(key.words);
}

// Returns a spec with the layout of `spec`, without mesh and tensor_meta: mostly that of an earlier spec,
// since most differ in their sizes alone.
py::object spec_of_layout(const py::object& spec, const Layout& layout) {
  const auto own = copy(spec, {{interned<"mesh">(), py::none()},
                               {interned<"tensor_meta">(), py::none()},
                               {interned<"_hash">(), py::none()}});
  auto words = words_of(layout, compat::strided_shards_represent_shard_order(spec));
  const auto& earlier = specs_of_layouts().try_emplace(std::move(words), own).first->second;
  const bool is_same = Py_TYPE(own.ptr()) == Py_TYPE(earlier.ptr()) &&
                       have_equal_items(attribute<"placements">(own), attribute<"placements">(earlier)) &&
                       attribute<"shard_order">(own).equal(attribute<"shard_order">(earlier));
  return is_same ? earlier : own;
}

py::object to_python_meta(const TensorMeta& meta) {
  const auto type = imported<"torch.distributed.tensor._dtensor_spec", "TensorMeta">();
  const auto shape = tuple_object(reinterpret_cast<PyObject*>(&THPSizeType), py::tuple(py::cast(meta.shape)));
  return named_tuple(type, shape, py::tuple(py::cast(meta.stride)),
                     to_python(static_cast<at::ScalarType>(meta.dtype)));
}

// Makes a spec of a layout that is known and has no masks, without Python. Returns null for another layout.
py::object spec_of_known_layout(const Spec& spec, py::handle mesh, bool strided_as_order) {
  const auto& layouts = specs_of_layouts();
  auto known = layouts.find(words_of(spec.layout, strided_as_order));
  if (known == layouts.end() && !has_strided_shards(spec.layout)) {
    known = layouts.find(words_of(spec.layout, !strided_as_order));
  }
  if (known == layouts.end()) {
    return {};
  }
  const auto made = copy(
      known->second, {{interned<"mesh">(), mesh}, {interned<"tensor_meta">(), to_python_meta(spec.meta)}});
  set_field<"_hash">(made.ptr(), py::int_(compat::hash_of_spec(made)));
  return made;
}

// Returns the shared spec of this value. If it is new, `make` makes the spec, on its mesh.
template <typename Make>
SharedSpecPtr find_or_make(py::handle mesh, const Spec& value, bool strided_as_order, const Make& make) {
  const auto mesh_id = id_of_mesh(mesh);
  SpecKey key(mesh_id, value, strided_as_order);
  if (const auto* const known = specs().find(key)) {
    return *known;
  }
  auto spec = spec_of_known_layout(value, mesh, strided_as_order);
  auto shared = std::make_shared<const SharedSpec>(mesh_id, value, spec ? spec : make());
  specs().insert_if_admitted(std::move(key), shared);
  return shared;
}

// Compares values if the placements are of known kinds: Python's comparison takes ten times as long.
bool are_same_placements(const py::object& one, const py::object& other) {
  if (one.is(other)) {
    return true;
  }
  try {
    return to_placements(one) == to_placements(other);
  } catch (const c10::Error&) {
    return are_equal(one, other);
  }
}

}  // namespace

Layout SpecObjects::read_with_norms() const {
  Layout layout;
  for (const auto& placement : py::reinterpret_borrow<py::sequence>(placements)) {
    layout.placements.push_back(to_placement_or_norm(placement));
  }
  layout.order = to_shard_order(order);
  return layout;
}

bool are_equal(const py::object& one, const py::object& other) {
  const int result = one.is(other) ? 1 : PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);
  if (result < 0) {
    throw py::error_already_set();
  }
  return result == 1;
}

bool have_same_layout(py::handle spec, py::handle other) {
  return spec.is(other) ||
         (are_same_placements(attribute<"placements">(spec), attribute<"placements">(other)) &&
          are_equal(attribute<"shard_order">(spec), attribute<"shard_order">(other)));
}

bool read_ints(py::handle tuple, std::vector<int64_t>& numbers) {
  if (!PyTuple_Check(tuple.ptr())) {
    return false;
  }
  const auto count = PyTuple_GET_SIZE(tuple.ptr());
  numbers.resize(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    auto* const number = PyTuple_GET_ITEM(tuple.ptr(), i);
    if (!PyLong_CheckExact(number)) {
      return false;
    }
    int overflow = 0;
    numbers[i] = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow != 0) {
      return false;
    }
  }
  return true;
}

py::object meta_of(py::handle spec, const char* op) {
  auto meta = attribute<"tensor_meta">(spec);
  TORCH_CHECK_VALUE(
      !meta.is_none(), "funcol::", op,
      ": the source spec has no tensor_meta, so the shape of the whole tensor is not known. Pass a "
      "DTensorSpec with tensor_meta.");
  return meta;
}

std::vector<int64_t> shape_of(py::handle spec, const char* op) {
  const auto shape = attribute<"shape">(meta_of(spec, op));
  std::vector<int64_t> sizes;
  if (!read_ints(shape, sizes)) {
    sizes.clear();
    for (const auto& size : py::reinterpret_borrow<py::sequence>(shape)) {
      sizes.push_back(py::int_(size).cast<int64_t>());
    }
  }
  return sizes;
}

// Lets find_by_hash() find the spec, and its later copies.
void share_hash(PyObject* spec, const SharedSpec& shared) {
  const auto own = cached_hash(spec);
  if (!own || by_hash().count(own.ptr()) != 0) {
    return;
  }
  for (const auto& hash : shared.hashes_) {
    if (PyObject_RichCompareBool(hash.ptr(), own.ptr(), Py_EQ) == 1) {
      set_field<"_hash">(spec, hash);
      return;
    }
  }
  shared.hashes_.push_back(own);
  by_hash().emplace(own.ptr(), &shared);
}

py::object copy_spec(py::handle spec) { return copy(spec, {}); }

py::object copy_without_mesh(py::handle spec) {
  if (PyObject_Hash(spec.ptr()) == -1) {  // the spec keeps its hash, so that copies have it
    PyErr_Clear();
  }
  return copy(spec, {{interned<"mesh">(), py::none()}});
}

py::object copy_onto(py::handle spec, py::handle mesh) { return copy(spec, {{interned<"mesh">(), mesh}}); }

SharedSpec::SharedSpec(uint64_t mesh_id, const Spec& value, const py::object& spec)
    : id(mesh_id << 40 | ++num_shared_specs),
      geometry(value.meta.shape, value.meta.stride),
      same_layout_(spec_of_layout(spec, value.layout)),
      meta_(attribute<"tensor_meta">(spec)) {
  const auto hash = PyObject_Hash(spec.ptr());
  if (hash == -1) {
    throw py::error_already_set();
  }
  hashes_.push_back(py::int_(hash));
  by_hash().emplace(hashes_[0].ptr(), this);
}

SharedSpec::~SharedSpec() {
  for (const auto& hash : hashes_) {
    by_hash().erase(hash.ptr());
  }
}

py::object SharedSpec::on(py::handle mesh) const {
  return copy(
      same_layout_,
      {{interned<"mesh">(), mesh}, {interned<"tensor_meta">(), meta_}, {interned<"_hash">(), hashes_[0]}});
}

py::object SharedSpec::canonical() const {
  if (!canonical_) {
    canonical_ = on(py::none());
  }
  return canonical_;
}

size_t heap_bytes(const SharedSpecPtr& spec) {
  constexpr size_t kHashBytes = 48 + 2 * kBlockBytes;  // in Python and in the index
  const auto num_dims = spec->geometry.sizes().size();
  return sizeof(SharedSpec) + 2 * kBlockBytes + kHashBytes + 208 + num_dims * (2 * sizeof(PyObject*) + 32);
}

SharedSpecPtr shared_spec_on(PyObject* spec, py::handle mesh) {
  if (const auto* const known = find_by_hash(spec);
      known != nullptr && is_id_on(known->id, id_of_mesh(mesh))) {
    return known->shared_from_this();
  }
  try {
    auto value = has_norms(spec) ? read_spec_as_pytorch(spec) : read_spec(spec);
    if (has_masks(value.layout)) {
      return nullptr;
    }
    const bool strided_as_order =
        has_strided_shards(value.layout) && compat::strided_shards_represent_shard_order(spec);
    return find_or_make(mesh, value, strided_as_order, [&] { return copy_onto(spec, mesh); });
  } catch (const c10::Error&) {
  } catch (const py::error_already_set&) {
  }
  return nullptr;
}

SharedSpecPtr shared_spec(PyObject* spec) {
  if (const auto* const known = find_by_hash(spec)) {
    return known->shared_from_this();
  }
  const auto mesh = find_attribute<"mesh">(spec);
  auto shared = mesh ? shared_spec_on(spec, mesh) : nullptr;
  if (shared == nullptr) {
    return nullptr;
  }
  if (PyObject_Hash(spec) == -1) {  // the spec keeps its hash from here on
    PyErr_Clear();
    return nullptr;
  }
  share_hash(spec, *shared);
  return shared;
}

uint64_t id_of_spec(PyObject* spec) {
  if (const auto* const known = find_by_hash(spec)) {
    return known->id;
  }
  const auto shared = shared_spec(spec);
  return shared == nullptr ? 0 : shared->id;
}

py::object to_python_spec(const Spec& spec, py::handle mesh, bool strided_as_order,
                          const MaskedPlacements& masked) {
  if (has_masks(spec.layout)) {
    return make_spec(spec, mesh, strided_as_order, masked);
  }
  const auto shared = find_or_make(mesh, spec, strided_as_order && has_strided_shards(spec.layout),
                                   [&] { return make_spec(spec, mesh, strided_as_order, masked); });
  return shared->on(mesh);
}

py::object canonical_spec(py::handle spec) {
  const auto shared = shared_spec(spec.ptr());
  TORCH_CHECK_NOT_IMPLEMENTED(
      shared != nullptr, "funcol: a spec without values equals no other: ", std::string(py::str(spec)), ".");
  return shared->canonical();
}

py::object replicate() {
  static auto* const placement = imported<kPlacementTypes, "Replicate">()().release().ptr();
  return py::reinterpret_borrow<py::object>(placement);
}

}  // namespace funcol::python
