#include "transfer/dtensors/cross_mesh.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layout/cache.h"
#include "layout/hash.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/layouts.h"
#include "pyobjects/without_gil.h"
#include "transfer/transfer_exchange.h"

namespace funcol::python {
namespace {

// Two meshes, and the process group that leads from one to the other.
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
  pairs().insert_if_admitted(key, made);
  return made;
}

// A maker of programs for a pair of meshes.
class CrossMeshPrograms {
 public:
  CrossMeshPrograms(py::handle src_mesh, KnownMesh& src, py::handle dst_mesh, KnownMesh& dst)
      : src_mesh_(src_mesh),
        dst_mesh_(dst_mesh),
        src_(&src),
        dst_(&dst),
        pair_(find_pair(src_mesh, src, dst_mesh, dst)) {}

  TransferProgram make(const TransferKey& key) const {
    const auto& src = pair_->src;
    const auto& dst = pair_->dst;
    const MeshChangeTask task{
        src,       checked_layout("funcol::redistribute: src_spec", key.src, src.mesh, key.shape),
        dst,       checked_layout("funcol::redistribute: dst_spec", key.dst, dst.mesh, key.shape),
        key.shape, key.itemsize};
    return make_program(make_mesh_change(task, key));
  }

 private:
  static MeshChange make_mesh_change(const MeshChangeTask& task, const TransferKey& key) {
    const WithoutGil no_gil;
    return plan_mesh_change(task,
                            {key.model.value_or(CostModel(default_alpha_beta(task.src_mesh.mesh))),
                             key.dst_model.value_or(CostModel(default_alpha_beta(task.dst_mesh.mesh)))},
                            key.max_bytes);
  }

  TransferProgram make_program(const MeshChange& change) const {
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
                                                 : make_execution(*change.before, src_mesh_, *src_);
    }
    if (change.transfer.has_value()) {
      program.set_exchange(packed_transfer(*change.transfer, *pair_->group, pair_->rank));
    }
    if (change.after.has_value() && dst_->coordinate.has_value()) {
      program.after = make_execution(*change.after, dst_mesh_, *dst_);
    }
    return program;
  }

  // Returns the execution on the common mesh, whose groups are those of its views.
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

  // Returns the axes of a view that are `axes` of the common mesh, or nullopt if they have no group.
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
    return covered == axes && view.has_group(found) ? std::optional(found) : std::nullopt;
  }

  py::handle src_mesh_;
  py::handle dst_mesh_;
  KnownMesh* src_;
  KnownMesh* dst_;
  MeshPairPtr pair_;
};

}  // namespace

MakeProgram between_meshes(py::handle src_mesh, KnownMesh& src, py::handle dst_mesh, KnownMesh& dst) {
  return [between = CrossMeshPrograms(src_mesh, src, dst_mesh, dst)](const TransferKey& key) {
    return between.make(key);
  };
}

RankedMesh to_ranked_mesh(py::handle device_mesh) {
  return {to_mesh(device_mesh),
          device_mesh.attr("mesh").attr("flatten")().attr("tolist")().cast<std::vector<int64_t>>()};
}

}  // namespace funcol::python
