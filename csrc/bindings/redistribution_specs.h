// What a redistribution takes from Python's specs, and the executions that are remembered for it.
//
// Everything here needs the GIL, which is the lock of the caches, too.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/attributes.h"
#include "bindings/python_layout.h"
#include "layout/hash.h"
#include "planner/cost_model.h"
#include "redistribute/executor.h"

namespace funcol::python {

// What is known of a DeviceMesh. Groups are looked up when a plan first needs them.
struct KnownMesh {
  uint64_t id = 0;
  Mesh mesh;
  std::optional<Coordinate> coordinate;  // none on a rank outside of the mesh
  AxisGroups groups;
};

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

// What is known of a mesh; good until the DeviceMesh goes.
KnownMesh& known_mesh(py::handle device_mesh);

// The group along `axes` that this rank is in; good as `known` is.
const AxisGroup& find_group(AxisSet axes, py::handle device_mesh, KnownMesh& known);

// The execution for this rank, which is inside the mesh. ValueError if there is no plan.
ExecutionPtr execution_of(ExecutionKey key, py::handle device_mesh, KnownMesh& known);
void forget_executions();

// (local, source spec, target spec, async_op, model, max_bytes, is_explicit, lenient) -> local, for Python.
// `lenient`: NotImplemented, not ValueError, for a local tensor of another shape than the source gives it if
// PyTorch moves that rightly.
PyObject* redistribute_local_tensor(PyObject* module, PyObject* const* args, Py_ssize_t count);

// A function of funcol.redistribution.
py::object python_function(const char* name);

struct SpecObjects {
  explicit SpecObjects(py::handle spec)
      : mesh(attribute<"mesh">(spec)),
        placements(attribute<"placements">(spec)),
        order(attribute<"shard_order">(spec)) {}

  Layout read() const { return {to_placements(placements), to_shard_order(order)}; }

  py::object mesh;
  py::object placements;
  py::object order;
};

// The spec's tensor_meta; ValueError naming `op` if it has none.
py::object meta_of(py::handle spec, const char* op);

// The shape of the whole tensor. A symbol becomes the number that it stands for, and a guard.
std::vector<int64_t> shape_of(py::handle spec, const char* op);

bool has_masks(const ExecutionKey& key);

// Masks are told apart by address; for a plan it matters only which are the same.
void number_masks(ExecutionKey& key);

// The hooks call Python: they take the GIL. Both specs outlive them.
MaskHooks mask_hooks(const SpecObjects& src, const SpecObjects& dst);

}  // namespace funcol::python
