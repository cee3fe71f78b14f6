// Executions of redistributions between specs, made of plans and remembered.
//
// Everything here needs the GIL, which is the lock of the caches, too.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "dtensor/meshes.h"
#include "layout/hash.h"
#include "planner/cost_model.h"
#include "pyobjects/spec_objects.h"
#include "redistribute/executor.h"

namespace funcol::python {

// What an execution depends on.
struct ExecutionKey {
  uint64_t mesh_id;
  Layout src;  // as it was given: an empty order is the default one
  Layout dst;
  std::vector<int64_t> shape;
  int64_t itemsize;
  std::optional<CostModel> model;
  std::optional<int64_t> max_bytes;

  friend bool operator==(const ExecutionKey&, const ExecutionKey&) = default;
};

struct ExecutionKeyHash {
  size_t operator()(const ExecutionKey& key) const {
    Hash hash;
    hash.add(key.mesh_id);
    hash.add_all(key.shape);
    hash.add(key.itemsize);
    hash.add(key.src);
    hash.add(key.dst);
    return hash.value();
  }
};

using ExecutionPtr = std::shared_ptr<const Execution>;

// The execution for this rank, which is inside the mesh. ValueError if there is no plan.
ExecutionPtr execution_of(ExecutionKey key, py::handle device_mesh, KnownMesh& known);
void forget_executions();

bool has_masks(const ExecutionKey& key);

// Masks are told apart by address; for a plan it matters only which are the same.
void number_masks(ExecutionKey& key);

// The hooks call Python: they take the GIL. Both specs outlive them.
MaskHooks mask_hooks(const SpecObjects& src, const SpecObjects& dst);

}  // namespace funcol::python
