#include "pyobjects/layouts.h"

#include <torch/csrc/distributed/Placement.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include "pyobjects/attributes.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/mesh_table.h"

namespace funcol::python {
namespace {

// Returns the C++ part that every placement of these classes has, bypassing Python's attributes.
template <typename T>
const T& cpp_part(py::handle object) {
  py::detail::type_caster_base<T> caster;
  TORCH_INTERNAL_ASSERT(caster.load(object, /*convert=*/false), "funcol: a ", type_name(object),
                        " without its C++ part.");
  return *static_cast<T*>(caster);
}

bool is_placement(py::handle object) {
  py::detail::type_caster_base<torch::distributed::Placement> caster;
  return caster.load(object, /*convert=*/false);
}

[[noreturn]] void refuse_placement(py::handle object) {
  TORCH_CHECK_TYPE(
      is_placement(object), "funcol: got a ", type_name(object),
      " where a placement belongs. Pass Replicate(), Shard(dim) or Partial(op) for each mesh axis.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "funcol: the placement ", std::string(py::repr(object)), " is a ", type_name(object),
      ", a kind with rules of its own. There are Replicate, Shard, _StridedShard, Partial and "
      "_MaskPartial.");
}

// Returns the reduction of a name. Raises NotImplementedError for an unknown one, which PyTorch rejects only
// when it reduces.
PartialOp known_reduction(const std::string& name) {
  try {
    return partial_op(name);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "funcol: ", error.what());
  }
}

// A list or tuple. Reads its items without calling Python, which indexing a named tuple would do.
class Items {
 public:
  Items(py::handle object, const char* what) : object_(py::reinterpret_borrow<py::object>(object)) {
    TORCH_CHECK_TYPE(PyList_Check(object.ptr()) || PyTuple_Check(object.ptr()), "funcol: ", what, " are a ",
                     type_name(object), ". Expected a list or tuple.");
  }

  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(object_.ptr()); }

  py::object operator[](Py_ssize_t index) const {
    return py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(object_.ptr(), index));
  }

 private:
  py::object object_;
};

int64_t integer(py::handle object, const char* what) {
  TORCH_CHECK_TYPE(PyLong_Check(object.ptr()), "funcol: ", what, " is a ", type_name(object),
                   ". Expected an int.");
  return object.cast<int64_t>();
}

struct CachedMesh {
  Mesh mesh;
  Py_ssize_t num_flattened = -1;
};

MeshTable<CachedMesh>& cached_meshes() {
  static MeshTable<CachedMesh> meshes;
  return meshes;
}

// Returns the number of flattened submeshes of the mesh that `device_mesh` was sliced from; nullopt if it is
// not a DeviceMesh.
std::optional<Py_ssize_t> num_flattened(py::handle device_mesh) {
  const auto root = find_attribute<"_root_mesh">(device_mesh);
  const auto mapping =
      find_attribute<"_flatten_mapping">(!root || root.is_none() ? device_mesh : py::handle(root));
  if (!mapping || !PyDict_Check(mapping.ptr())) {
    return std::nullopt;
  }
  return PyDict_GET_SIZE(mapping.ptr());
}

Mesh read_mesh(py::handle device_mesh) {
  const auto axes = callback("mesh_axes")(device_mesh).cast<py::tuple>();
  return {axes[0].cast<std::vector<int64_t>>(), axes[1].cast<std::vector<std::string>>(),
          axes[2].cast<std::vector<AxisSet>>(), axes[3].cast<int64_t>()};
}

}  // namespace

Placement to_placement(py::handle object) {
  namespace stock = torch::distributed;
  const auto type = py::type::handle_of(object);
  if (type.is(imported<kPlacementTypes, "Replicate">())) {
    return Placement::replicate();
  }
  if (type.is(imported<kPlacementTypes, "Shard">())) {
    return Placement::shard(cpp_part<stock::Shard>(object).dim);
  }
  if (type.is(imported<kPlacementTypes, "Partial">())) {
    return Placement::partial(known_reduction(cpp_part<stock::Partial>(object).reduce_op));
  }
  if (type.is(imported<kPlacementTypes, "_StridedShard">())) {
    const auto& strided = cpp_part<stock::StridedShard>(object);
    return Placement::shard(strided.dim, strided.split_factor);
  }
  if (type.is(imported<kPlacementTypes, "_MaskPartial">())) {
    const py::object buffer = object.attr("mask_buffer");
    return Placement::partial(known_reduction(cpp_part<stock::Partial>(object).reduce_op),
                              reinterpret_cast<uint64_t>(buffer.ptr()));
  }
  refuse_placement(object);
}

std::optional<int64_t> dim_of_shard(py::handle object) {
  const auto type = py::type::handle_of(object);
  return type.is(imported<kPlacementTypes, "Shard">())
             ? std::optional(cpp_part<torch::distributed::Shard>(object).dim)
             : std::nullopt;
}

bool is_norm(py::handle placement) {
  return py::type::handle_of(placement).is(
      imported<"torch.distributed.tensor._ops._math_ops", "_NormPartial">());
}

Placement to_placement_or_norm(py::handle object) {
  if (is_norm(object)) {
    const auto order = attribute<"norm_type">(object);
    return Placement::norm_partial({order.cast<double>(), PyLong_Check(order.ptr()) != 0});
  }
  return to_placement(object);
}

std::vector<Placement> to_placements(py::handle object) {
  if (PyUnicode_Check(object.ptr())) {
    return parse_placements(object.cast<std::string>());
  }
  std::vector<Placement> placements;
  const Items items(object, "the placements");
  placements.reserve(items.size());
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    placements.push_back(to_placement(items[i]));
  }
  return placements;
}

ShardOrder to_shard_order(py::handle object) {
  ShardOrder order;
  if (object.is_none()) {
    return order;
  }
  const Items entries(object, "the entries of a shard order");
  for (Py_ssize_t i = 0; i < entries.size(); ++i) {
    const Items pair(entries[i], "a tensor dim and its mesh dims");
    TORCH_CHECK_VALUE(pair.size() == 2, "funcol: an entry of the shard order has ", pair.size(),
                      " parts. Expected ShardOrderEntry(tensor_dim, mesh_dims).");
    const auto dim = integer(pair[0], "the tensor dim of a shard order");
    TORCH_CHECK_VALUE(dim >= 0, "funcol: the shard order names tensor dim ", dim, ". Count it from 0.");
    constexpr int64_t most_dims = 64;
    TORCH_CHECK_VALUE(dim < most_dims, "funcol: the shard order names tensor dim ", dim,
                      ". A tensor has at most ", most_dims, " dims.");
    if (static_cast<int64_t>(order.size()) <= dim) {
      order.resize(dim + 1);
    }
    TORCH_CHECK_VALUE(order[dim].empty(), "funcol: the shard order names tensor dim ", dim, " twice.");
    const Items axes(pair[1], "the mesh dims of a shard order");
    for (Py_ssize_t j = 0; j < axes.size(); ++j) {
      order[dim].push_back(integer(axes[j], "a mesh dim of a shard order"));
    }
  }
  return order;
}

const Mesh& to_mesh(py::handle object) {
  const auto* const known = cached_meshes().find(object);
  if (known == nullptr) {
    py::detail::type_caster_base<Mesh> caster;
    if (caster.load(object, /*convert=*/false)) {
      return *static_cast<Mesh*>(caster);
    }
  }
  const auto flattened = num_flattened(object);
  TORCH_CHECK_TYPE(flattened.has_value(), "funcol: got a ", type_name(object),
                   " where a DeviceMesh belongs.");
  if (known != nullptr && known->num_flattened == *flattened) {
    return known->mesh;
  }
  return cached_meshes().insert_or_assign(object, {read_mesh(object), *flattened}).mesh;
}

bool has_masks(const Layout& layout) {
  return std::ranges::any_of(layout.placements, [](const auto& placement) { return placement.mask != 0; });
}

bool has_strided_shards(const Layout& layout) {
  return std::ranges::any_of(layout.placements, &Placement::is_strided);
}

}  // namespace funcol::python
