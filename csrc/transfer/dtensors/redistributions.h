// A cache of redistributions: of the plan's execution on this rank, and of the result's spec.
//
// Everything here needs the GIL, which is the lock of the cache, too.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "layout/heap_bytes.h"
#include "planner/cost_model.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/dtypes.h"
#include "pyobjects/meshes.h"
#include "pyobjects/spec_objects.h"
#include "pyobjects/specs.h"
#include "transfer/executor.h"

namespace funcol::python {

// How a redistribution is planned and run.
struct RedistributionOptions {
  bool async_op = false;
  std::optional<CostModel> model;    // none: the mesh's default model
  std::optional<int64_t> max_bytes;  // the most memory that a step may take; none: any
};

// The key of a redistribution. Stride and dtype stay empty if the caller has the result's spec.
struct RedistributionKey {
  uint64_t mesh_id = 0;
  Layout src;  // as given: an empty order is the default one
  Layout dst;
  std::vector<int64_t> shape;
  int64_t itemsize = 0;  // of the elements that are sent
  std::optional<CostModel> model;
  std::optional<int64_t> max_bytes;
  std::vector<int64_t> stride;          // of the whole tensor
  std::optional<at::ScalarType> dtype;  // of the result

  // Leaves out models, bounds and dtypes, which rarely differ.
  size_t hash() const;
  size_t heap_bytes() const {
    return funcol::heap_bytes(src) + funcol::heap_bytes(dst) + funcol::heap_bytes(shape) +
           funcol::heap_bytes(stride);
  }
  bool is_on(uint64_t id) const { return id == mesh_id; }
  friend bool operator==(const RedistributionKey&, const RedistributionKey&) = default;
};

using ExecutionPtr = std::shared_ptr<const Execution>;

// The execution for this rank, which is inside the mesh, and the remembered spec of the result, without its
// mesh: DTensors get copies, by copy_onto().
struct Target {
  ExecutionPtr execution;
  py::object spec;

  size_t heap_bytes() const { return execution->heap_bytes() + (spec ? kSpecBytes : 0); }
};

// Asks Python for the spec of a result, and returns with it the key of the move to its layout. ValueError for
// placements that the tensor cannot have.
template <typename Key>
std::pair<py::object, Key> new_target(Key key, py::handle src_spec, py::handle device_mesh,
                                      py::handle placements, py::handle order) {
  py::object spec = callback(Callback::kRedistributionTarget)(src_spec, device_mesh, placements, order,
                                                              to_python(key.dtype.value()));
  key.dst = SpecObjects(spec).read();
  key.stride.clear();
  key.dtype.reset();
  return {std::move(spec), std::move(key)};
}

// The execution of a redistribution between two specs. ValueError if there is no plan.
ExecutionPtr find_execution(const RedistributionKey& key, py::handle device_mesh, KnownMesh& known);

// The redistribution of a tensor of `src_spec` to `placements`, which have no masks, and `order`, a shard
// order or None. ValueError if there is no plan.
Target find_target(const RedistributionKey& key, py::handle src_spec, py::handle device_mesh,
                   KnownMesh& known, py::handle placements, py::handle order);

// The hooks of the masks in `key`; empty if there are none. Numbers the masks, whose values are addresses:
// for a plan it matters only which are the same. The hooks take the GIL to call Python. Both specs must
// outlive them.
MaskHooks take_masks(RedistributionKey& key, const SpecObjects& src, const SpecObjects& dst);

}  // namespace funcol::python
