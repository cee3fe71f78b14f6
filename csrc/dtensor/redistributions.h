// Redistributions that were asked for before: the execution of the plan on this rank and the spec of the
// result, remembered together.
//
// Everything here needs the GIL, which is the lock of the cache, too.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dtensor/meshes.h"
#include "planner/cost_model.h"
#include "pyobjects/spec_objects.h"
#include "redistribute/executor.h"

namespace funcol::python {

// How a redistribution is planned and run.
struct RedistributionOptions {
  bool async_op = false;
  std::optional<CostModel> model;    // none: the default one of the mesh
  std::optional<int64_t> max_bytes;  // the most memory that a step may take; none: any
};

// A redistribution as it is asked for. Where specs are given, not made, stride and dtype stay empty.
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

  friend bool operator==(const RedistributionKey&, const RedistributionKey&) = default;
};

using ExecutionPtr = std::shared_ptr<const Execution>;

// The execution for this rank, which is inside the mesh, and the spec of the result, which is the caller's
// own.
struct Target {
  ExecutionPtr execution;
  py::object spec;
};

// The execution of a redistribution between given specs. ValueError if there is no plan.
ExecutionPtr find_execution(RedistributionKey key, py::handle device_mesh, KnownMesh& known);

// Where a tensor of `src_spec` gets by `placements` and `order`, a shard order or None; there are no masks.
// ValueError if there is no plan.
Target find_target(RedistributionKey key, py::handle src_spec, py::handle device_mesh, KnownMesh& known,
                   py::handle placements, py::handle order);

void forget_redistributions();

bool has_masks(const RedistributionKey& key);

// Masks are told apart by address; for a plan it matters only which are the same.
void number_masks(RedistributionKey& key);

// The hooks call Python: they take the GIL. Both specs outlive them.
MaskHooks mask_hooks(const SpecObjects& src, const SpecObjects& dst);

}  // namespace funcol::python
