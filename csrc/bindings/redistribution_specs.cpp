#include "bindings/redistribution_specs.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/mesh_table.h"
#include "bindings/without_gil.h"
#include "planner/lru_cache.h"
#include "redistribute/plan_cache.h"

namespace funcol::python {
namespace {

constexpr size_t kNumExecutions = 1024;

MeshTable<KnownMesh>& known_meshes() {
  static MeshTable<KnownMesh> meshes;
  return meshes;
}

LruCache<ExecutionKey, ExecutionPtr, ExecutionKeyHash>& executions() {
  static LruCache<ExecutionKey, ExecutionPtr, ExecutionKeyHash> cache(kNumExecutions);
  return cache;
}

void find_groups(const Plan& plan, py::handle device_mesh, KnownMesh& known) {
  for (const auto& step : plan.steps) {
    if (communicates(step.kind)) {
      find_group(step.axes, device_mesh, known);
    }
  }
}

std::shared_ptr<const Plan> make_plan(const ExecutionKey& key, const Mesh& mesh) {
  try {
    const auto layout = [&](const char* side, const Layout& spec) {
      return without_strided_shards(make_layout(std::string("funcol::redistribute: ") + side, spec.placements,
                                                spec.order, mesh, static_cast<int64_t>(key.shape.size())),
                                    mesh, key.shape);
    };
    const Redistribution task{mesh, key.shape, key.itemsize, layout("src_spec", key.src),
                              layout("dst_spec", key.dst)};
    const WithoutGil no_gil;
    return cached_plan(task, key.model, key.max_bytes);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

}  // namespace

py::object python_function(const char* name) {
  return py::module::import("funcol.redistribution").attr(name);
}

KnownMesh& known_mesh(py::handle device_mesh) {
  static uint64_t num_meshes = 0;
  const auto& mesh = to_mesh(device_mesh);
  auto* const known = known_meshes().find(device_mesh);
  if (known != nullptr && known->mesh == mesh) {
    return *known;
  }
  const py::object coordinate = device_mesh.attr("get_coordinate")();
  auto& entry = known_meshes().put(device_mesh, {++num_meshes, mesh, std::nullopt, {}});
  if (!coordinate.is_none()) {
    entry.coordinate = coordinate.cast<Coordinate>();
  }
  return entry;
}

const AxisGroup& find_group(AxisSet axes, py::handle device_mesh, KnownMesh& known) {
  auto& groups = known.groups;
  const auto known_group = groups.find(axes);
  if (known_group != groups.end()) {
    return known_group->second;
  }
  static auto* const axis_group = python_function("_axis_group").release().ptr();
  const auto found = py::handle(axis_group)(device_mesh, axes).cast<py::tuple>();
  AxisGroup group{found[0].cast<std::string>(), found[1].cast<std::vector<int64_t>>()};
  return groups.emplace(axes, std::move(group)).first->second;
}

ExecutionPtr execution_of(ExecutionKey key, py::handle device_mesh, KnownMesh& known) {
  auto& cache = executions();
  if (const auto* execution = cache.get(key)) {
    return *execution;
  }
  const auto plan = make_plan(key, known.mesh);
  find_groups(*plan, device_mesh, known);
  TORCH_INTERNAL_ASSERT(known.coordinate.has_value());
  auto execution = std::make_shared<const Execution>(*plan, known.groups, *known.coordinate);
  cache.put(std::move(key), execution);
  return execution;
}

void forget_executions() { executions().clear(); }

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
  for (const auto& size : py::reinterpret_borrow<py::sequence>(shape)) {
    // A symbol becomes the number that it stands for, and a guard: a plan is made for sizes.
    sizes.push_back(PyLong_CheckExact(size.ptr()) ? PyLong_AsLongLong(size.ptr())
                                                  : py::int_(size).cast<int64_t>());
  }
  return sizes;
}

bool has_masks(const ExecutionKey& key) {
  const auto has_mask = [](const Placement& placement) { return placement.mask != 0; };
  return std::ranges::any_of(key.src.placements, has_mask) ||
         std::ranges::any_of(key.dst.placements, has_mask);
}

void number_masks(ExecutionKey& key) {
  std::vector<uint64_t> masks;
  for (auto* spec : {&key.src, &key.dst}) {
    for (auto& placement : spec->placements) {
      if (placement.mask != 0) {
        const auto found = std::ranges::find(masks, placement.mask);
        const auto number = static_cast<uint64_t>(found - masks.begin()) + 1;
        if (found == masks.end()) {
          masks.push_back(placement.mask);
        }
        placement.mask = number;
      }
    }
  }
}

MaskHooks mask_hooks(const SpecObjects& src, const SpecObjects& dst) {
  const auto call = [](const char* function, const SpecObjects& spec) {
    return [function, &spec](const at::Tensor& tensor, int64_t axis) {
      const py::gil_scoped_acquire gil;
      const auto placement = py::reinterpret_borrow<py::sequence>(spec.placements)[axis];
      return python_function(function)(placement, tensor, spec.mesh, axis).cast<at::Tensor>();
    };
  };
  return {call("_apply_mask", src), call("_mask", dst)};
}

}  // namespace funcol::python
