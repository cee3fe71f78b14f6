#include "transfer/dtensors/redistributions.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "layout/cache.h"
#include "layout/hash.h"
#include "planner/search.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/dtypes.h"
#include "pyobjects/specs.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

// Target::spec is null in the entries of find_execution(), whose callers have the result's spec.
using Targets = Cache<RedistributionKey, Target>;

Targets& targets() {
  static auto* const cache = new Targets(find_table("redistributions"));  // NOLINT: outlives Python
  return *cache;
}

Plan make_plan(const RedistributionKey& key, const Mesh& mesh) {
  try {
    const auto layout = [&](const char* side, const Layout& spec) {
      return without_strided_shards(make_layout(std::string("funcol::redistribute: ") + side, spec.placements,
                                                spec.order, mesh, static_cast<int64_t>(key.shape.size())),
                                    mesh, key.shape);
    };
    const Redistribution task{mesh, key.shape, key.itemsize, layout("src_spec", key.src),
                              layout("dst_spec", key.dst)};
    const WithoutGil no_gil;
    return plan_redistribution(task, key.model.value_or(CostModel(default_alpha_beta(mesh))), key.max_bytes);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

ExecutionPtr make_execution(const RedistributionKey& key, py::handle device_mesh, KnownMesh& known) {
  const auto plan = make_plan(key, known.mesh);
  for (const auto& step : plan.steps) {
    if (communicates(step.kind)) {
      find_group(step.axes, device_mesh, known);
    }
  }
  TORCH_INTERNAL_ASSERT(known.coordinate.has_value());
  return std::make_shared<const Execution>(plan, known.groups, *known.coordinate);
}

}  // namespace

size_t RedistributionKey::hash() const {
  Hash hash;
  hash.add(mesh_id);
  hash.add_all(shape);
  hash.add(itemsize);
  hash.add(src);
  hash.add(dst);
  return hash.value();
}

ExecutionPtr find_execution(const RedistributionKey& key, py::handle device_mesh, KnownMesh& known) {
  if (const auto* target = targets().find(key)) {
    return target->execution;
  }
  auto execution = make_execution(key, device_mesh, known);
  targets().put(key, {execution, {}});
  return execution;
}

Target find_target(const RedistributionKey& key, py::handle src_spec, py::handle device_mesh,
                   KnownMesh& known, py::handle placements, py::handle order) {
  if (const auto* target = targets().find(key)) {
    return *target;
  }
  const auto [spec, given] = new_target(key, src_spec, device_mesh, placements, order);
  auto execution = find_execution(given, device_mesh, known);  // ValueError for illegal specs
  Target target{std::move(execution), copy_without_mesh(spec)};
  targets().put(key, target);
  return target;
}

MaskHooks take_masks(RedistributionKey& key, const SpecObjects& src, const SpecObjects& dst) {
  if (!has_masks(key.src) && !has_masks(key.dst)) {
    return {};
  }
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
  const auto call = [](Callback function, const SpecObjects& spec) {
    return [function, &spec](const at::Tensor& tensor, int64_t axis) {
      const py::gil_scoped_acquire gil;
      const auto placement = py::reinterpret_borrow<py::sequence>(spec.placements)[axis];
      return callback(function)(placement, tensor, spec.mesh, axis).cast<at::Tensor>();
    };
  };
  return {call(Callback::kApplyMask, src), call(Callback::kFillMask, dst)};
}

}  // namespace funcol::python
