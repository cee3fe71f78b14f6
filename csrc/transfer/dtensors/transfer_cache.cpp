#include "transfer/dtensors/transfer_cache.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "layout/cache.h"
#include "layout/hash.h"
#include "planner/search.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"

namespace funcol::python {
namespace {

Cache<TransferKey, CachedTransfer>& transfers() {
  static auto* const cache =
      new Cache<TransferKey, CachedTransfer>(find_table("transfers"));  // NOLINT: outlives Python
  return *cache;
}

Plan make_plan(const TransferKey& key, const Mesh& mesh) {
  const Redistribution task{mesh, key.shape, key.itemsize,
                            checked_layout("funcol::redistribute: src_spec", key.src, mesh, key.shape),
                            checked_layout("funcol::redistribute: dst_spec", key.dst, mesh, key.shape)};
  const WithoutGil no_gil;
  return plan_redistribution(task, key.model.value_or(CostModel(default_alpha_beta(mesh))), key.max_bytes);
}

}  // namespace

size_t TransferKey::hash() const {
  Hash hash;
  hash.add(mesh_id);
  hash.add(dst_mesh_id);
  hash.add_all(shape);
  hash.add(itemsize);
  hash.add(src);
  hash.add(dst);
  hash.add(owner);
  return hash.value();
}

TransferProgramPtr find_program(const TransferKey& key, const MakeProgram& make) {
  if (const auto* known = transfers().find(key)) {
    return known->program;
  }
  try {
    auto program = std::make_shared<const TransferProgram>(make(key));
    transfers().insert_if_admitted(key, {program, {}});
    return program;
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

CachedTransfer find_transfer(const TransferKey& key, py::handle src_spec, py::handle device_mesh,
                             py::handle placements, py::handle order, const MakeProgram& make) {
  if (const auto* known = transfers().find(key)) {
    return *known;
  }
  const py::object spec = callback("redistribution_target")(src_spec, device_mesh, placements, order,
                                                            to_python(key.dtype.value()));
  auto given = key;
  given.dst = SpecObjects(spec).read();
  given.stride.clear();
  given.dtype.reset();
  CachedTransfer transfer{find_program(given, make), copy_without_mesh(spec)};
  transfers().insert_if_admitted(key, transfer);
  return transfer;
}

MakeProgram within_mesh(py::handle device_mesh, KnownMesh& known) {
  return [device_mesh, &known](const TransferKey& key) {
    const auto plan = make_plan(key, known.mesh);
    return known.coordinate.has_value() ? TransferProgram(make_execution(plan, device_mesh, known))
                                        : TransferProgram();
  };
}

Layout checked_layout(const char* side, const Layout& given, const Mesh& mesh,
                      const std::vector<int64_t>& shape) {
  try {
    const auto num_dims = static_cast<int64_t>(shape.size());
    return without_strided_shards(make_layout(side, given.placements, given.order, mesh, num_dims), mesh,
                                  shape);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

ExecutionPtr make_execution(const Plan& plan, py::handle device_mesh, KnownMesh& known) {
  for (const auto& step : plan.steps) {
    if (communicates(step.kind)) {
      find_group(step.axes, device_mesh, known);
    }
  }
  TORCH_INTERNAL_ASSERT(known.coordinate.has_value());
  return std::make_shared<const Execution>(plan, known.groups, *known.coordinate);
}

MaskHooks make_mask_hooks(TransferKey& key, const SpecObjects& src, const SpecObjects& dst) {
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
  return {call("apply_mask", src), call("fill_mask", dst)};
}

}  // namespace funcol::python
