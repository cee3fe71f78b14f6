#include "transfer/dtensors/cross_mesh.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layout/cache.h"
#include "layout/hash.h"
#include "pyobjects/attributes.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/layouts.h"
#include "pyobjects/meshes.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"
#include "transfer/bundle.h"
#include "transfer/dtensors/transfer_cache.h"
#include "transfer/op_names.h"
#include "transfer/run_mesh_changes.h"
#include "transfer/transfer_exchange.h"

namespace funcol::python {
namespace {

// Two meshes, and the groups that lead from one to the other.
struct MeshPair {
  RankedMesh src;
  RankedMesh dst;
  int64_t rank = 0;                            // of this process
  std::shared_ptr<const TransferGroup> group;  // null on a rank outside of both meshes

  size_t heap_bytes() const { return sizeof(TransferGroup) + 3 * funcol::heap_bytes(src.ranks); }
};
using MeshPairPtr = std::shared_ptr<const MeshPair>;

struct PairKey {
  uint64_t src = 0;  // ids of known meshes
  uint64_t dst = 0;

  size_t hash() const {
    Hash hash;
    hash.add(src);
    hash.add(dst);
    return hash.value();
  }
  bool is_on(uint64_t mesh_id) const { return mesh_id == src || mesh_id == dst; }
  friend bool operator==(const PairKey&, const PairKey&) = default;
};

Cache<PairKey, MeshPairPtr>& pairs() {
  static auto* const cache =
      new Cache<PairKey, MeshPairPtr>(find_table("mesh_pairs"));  // NOLINT: outlives Python
  return *cache;
}

MeshPairPtr find_pair(py::handle src_mesh, const KnownMesh& src, py::handle dst_mesh, const KnownMesh& dst) {
  const PairKey key{src.id, dst.id};
  if (const auto* known = pairs().find(key)) {
    return *known;
  }
  const auto found = callback("mesh_pair")(src_mesh, dst_mesh).cast<py::tuple>();
  MeshPair pair{{src.mesh, found[0].cast<std::vector<int64_t>>()},
                {dst.mesh, found[1].cast<std::vector<int64_t>>()},
                found[2].cast<int64_t>(),
                nullptr};
  if (!found[3].is_none()) {
    TransferGroup group{found[3].cast<std::string>(), found[4].cast<std::vector<int64_t>>()};
    group.has_others = group.ranks.size() > funcol::all_ranks({pair.src, {}, pair.dst, {}, {}, 1}).size();
    pair.group = std::make_shared<const TransferGroup>(std::move(group));
  }
  auto made = std::make_shared<const MeshPair>(std::move(pair));
  pairs().put(key, made);
  return made;
}

// One call's way from mesh to mesh.
class Way {
 public:
  Way(py::object src_mesh, py::object dst_mesh, const MeshChangeOptions& options)
      : src_mesh_(std::move(src_mesh)),
        dst_mesh_(std::move(dst_mesh)),
        src_(&known_mesh(src_mesh_)),
        dst_(&known_mesh(dst_mesh_)),
        pair_(find_pair(src_mesh_, *src_, dst_mesh_, *dst_)),
        options_(options) {}

  const py::object& src_mesh() const { return src_mesh_; }
  const py::object& dst_mesh() const { return dst_mesh_; }

  TransferKey key(Layout src, Layout dst, int64_t itemsize) const {
    TransferKey key{src_->id, std::move(src), std::move(dst), {}, itemsize};
    key.dst_mesh_id = dst_->id;
    if (options_.models.has_value()) {
      key.model = options_.models->src;
      key.dst_model = options_.models->dst;
    }
    key.max_bytes = options_.max_bytes;
    return key;
  }

  TransferProgram make(const TransferKey& key) const {
    const auto& src = pair_->src;
    const auto& dst = pair_->dst;
    const MeshChangeTask task{
        src,       checked_layout("funcol::redistribute: src_spec", key.src, src.mesh, key.shape),
        dst,       checked_layout("funcol::redistribute: dst_spec", key.dst, dst.mesh, key.shape),
        key.shape, key.itemsize};
    return ready(planned(task, key));
  }

 private:
  static MeshChange planned(const MeshChangeTask& task, const TransferKey& key) {
    const WithoutGil no_gil;
    return plan_mesh_change(task,
                            {key.model.value_or(CostModel(default_alpha_beta(task.src_mesh.mesh))),
                             key.dst_model.value_or(CostModel(default_alpha_beta(task.dst_mesh.mesh)))},
                            key.max_bytes);
  }

  TransferProgram ready(const MeshChange& change) const {
    TransferProgram program;
    program.bytes = change.peak_bytes;
    program.src = to_string(change.task.src);
    if (src_->coordinate.has_value()) {
      program.shape_before =
          local_shape(change.task.src, change.task.src_mesh.mesh, change.task.shape, *src_->coordinate);
    }
    if (!pair_->group) {
      return program;
    }
    if (change.before.has_value() && src_->coordinate.has_value()) {
      program.before = change.common.has_value() ? on_common_mesh(*change.common, *change.before)
                                                 : ready_execution(*change.before, src_mesh_, *src_);
    }
    if (change.transfer.has_value()) {
      program.set_exchange(packed_transfer(*change.transfer, *pair_->group, pair_->rank));
    }
    if (change.after.has_value() && dst_->coordinate.has_value()) {
      program.after = ready_execution(*change.after, dst_mesh_, *dst_);
    }
    return program;
  }

  // Groups of the common mesh are those of its views.
  ExecutionPtr on_common_mesh(const CommonMesh& common, const Plan& plan) const {
    AxisGroups groups;
    for (const auto& step : plan.steps) {
      if (!communicates(step.kind)) {
        continue;
      }
      if (const auto axes = axes_of_view(common.src_axes, src_->mesh, step.axes)) {
        groups[step.axes] = find_group(*axes, src_mesh_, *src_);
      } else if (const auto axes = axes_of_view(common.dst_axes, dst_->mesh, step.axes)) {
        groups[step.axes] = find_group(*axes, dst_mesh_, *dst_);
      }
    }
    const auto place = std::ranges::find(pair_->src.ranks, pair_->rank) - pair_->src.ranks.begin();
    return std::make_shared<const Execution>(plan, groups, common.mesh.coordinate(place));
  }

  // The axes of a view that are `axes` of the common mesh, if they have a group.
  static std::optional<AxisSet> axes_of_view(const std::vector<AxisSet>& view_axes, const Mesh& view,
                                             AxisSet axes) {
    AxisSet found = 0;
    AxisSet covered = 0;
    for (size_t axis = 0; axis < view_axes.size(); ++axis) {
      if (view_axes[axis] != 0 && (view_axes[axis] & ~axes) == 0) {
        found |= axis_set(static_cast<int64_t>(axis));
        covered |= view_axes[axis];
      }
    }
    const bool has_group = num_axes(found) == 1 || std::ranges::find(view.merged, found) != view.merged.end();
    return covered == axes && has_group ? std::optional(found) : std::nullopt;
  }

  py::object src_mesh_;
  py::object dst_mesh_;
  KnownMesh* src_;
  KnownMesh* dst_;
  MeshPairPtr pair_;
  const MeshChangeOptions& options_;
};

void check(const TransferProgram& program, const at::Tensor& local) {
  if (program.shape_before.has_value()) {
    TORCH_CHECK_VALUE(local.sizes() == *program.shape_before, "funcol::", kRedistribute,
                      ": the local tensor has shape ", local.sizes(), ", but this rank holds ",
                      at::IntArrayRef(*program.shape_before), " of it under ", program.src,
                      ". Pass the shard that belongs to the source spec.");
  }
}

std::vector<at::Tensor> run_without_gil(std::vector<TransferItem> items, const MeshChangeOptions& options) {
  const WithoutGil no_gil;
  return run_mesh_changes(std::move(items), options.async_op, options.max_bytes.value_or(kTogetherBytes));
}

void check_same_mesh(const py::object& mesh, const py::object& first, const char* side, Py_ssize_t index) {
  TORCH_CHECK_VALUE(mesh.is(first) || are_equal(mesh, first), "funcol::", kRedistribute, ": ", side, " ",
                    index, " is on ", std::string(py::repr(mesh)), ", the first one on ",
                    std::string(py::repr(first)), ". Tensors that go to another mesh together are on one.");
}

}  // namespace

py::object change_mesh(const py::list& dtensors, py::handle device_mesh, const py::list& placements,
                       py::handle order, const MeshChangeOptions& options) {
  const auto num_tensors = PyList_GET_SIZE(dtensors.ptr());
  std::optional<Way> way;
  const MakeProgram make = [&way](const TransferKey& key) { return way->make(key); };
  PlacementMemo src_placements;
  PlacementMemo dst_placements;
  const auto wanted_order = to_shard_order(order);
  std::vector<TransferItem> items;
  std::vector<py::object> specs;
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    const py::handle dtensor = PyList_GET_ITEM(dtensors.ptr(), i);
    const auto wanted = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(placements.ptr(), i));
    const auto spec = attribute<"_spec">(dtensor);
    const SpecObjects src(spec);
    if (!way.has_value()) {
      way.emplace(src.mesh, py::reinterpret_borrow<py::object>(device_mesh), options);
    }
    check_same_mesh(src.mesh, way->src_mesh(), "tensor", i);
    const auto local = attribute<"_local_tensor">(dtensor);
    const auto& tensor = THPVariable_Unpack(local.ptr());
    const auto meta = meta_of(spec, kRedistribute);
    auto key = way->key({src_placements.read(src.placements), to_shard_order(src.order)},
                        {dst_placements.read(wanted), wanted_order}, static_cast<int64_t>(tensor.itemsize()));
    key.dtype = to_dtype(attribute<"dtype">(meta));
    if (has_masks(key.src) || has_masks(key.dst) || !read_ints(attribute<"shape">(meta), key.shape) ||
        !read_ints(attribute<"stride">(meta), key.stride)) {
      return {};
    }
    auto transfer = find_transfer(key, spec, way->dst_mesh(), wanted, order, make);
    check(*transfer.program, tensor);
    items.push_back({std::move(transfer.program), tensor});
    specs.push_back(copy_onto(transfer.spec, way->dst_mesh()));
  }
  auto results = run_without_gil(std::move(items), options);
  py::list moved(num_tensors);
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    const auto local = to_python(std::move(results[i]));
    PyList_SET_ITEM(moved.ptr(), i, make_dtensor(local.ptr(), specs[i]).release().ptr());
  }
  return moved;  // NOLINT: no move, pybind11 converts
}

py::object change_mesh_of_locals(const py::list& locals, const py::list& src_specs, const py::list& dst_specs,
                                 const MeshChangeOptions& options) {
  std::optional<Way> way;
  const MakeProgram make = [&way](const TransferKey& key) { return way->make(key); };
  std::vector<TransferItem> items;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(locals.ptr()); ++i) {
    const py::handle src_spec = PyList_GET_ITEM(src_specs.ptr(), i);
    const SpecObjects src(src_spec);
    const SpecObjects dst(py::handle(PyList_GET_ITEM(dst_specs.ptr(), i)));
    if (!way.has_value()) {
      way.emplace(src.mesh, dst.mesh, options);
    }
    check_same_mesh(src.mesh, way->src_mesh(), "tensor", i);
    check_same_mesh(dst.mesh, way->dst_mesh(), "target", i);
    const auto& local = THPVariable_Unpack(PyList_GET_ITEM(locals.ptr(), i));
    auto key = way->key(src.read(), dst.read(), static_cast<int64_t>(local.itemsize()));
    if (has_masks(key.src) || has_masks(key.dst)) {
      return {};
    }
    key.shape = shape_of(src_spec, kRedistribute);
    auto program = find_program(key, make);
    check(*program, local);
    items.push_back({std::move(program), local});
  }
  return to_python(run_without_gil(std::move(items), options));
}

RankedMesh to_ranked_mesh(py::handle device_mesh) {
  return {to_mesh(device_mesh),
          device_mesh.attr("mesh").attr("flatten")().attr("tolist")().cast<std::vector<int64_t>>()};
}

}  // namespace funcol::python
