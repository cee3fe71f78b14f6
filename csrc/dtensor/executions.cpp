#include "dtensor/executions.h"

#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "planner/lru_cache.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/without_gil.h"
#include "redistribute/plan_cache.h"

namespace funcol::python {
namespace {

constexpr size_t kNumExecutions = 1024;

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
