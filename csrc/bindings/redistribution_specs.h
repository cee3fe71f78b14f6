// What a redistribution takes from Python's specs, and the executions that are remembered for it.
//
// Everything here needs the GIL, which is the lock of the caches, too.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

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

// A spec's parts, as they were given.
struct Spec {
  std::vector<Placement> placements;
  ShardOrder order;

  bool has_masks() const {
    return std::any_of(placements.begin(), placements.end(), [](const auto& one) { return one.mask != 0; });
  }
  friend bool operator==(const Spec&, const Spec&) = default;
};

// What an execution depends on.
struct ExecutionKey {
  uint64_t mesh_id;
  Spec src;
  Spec dst;
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
    for (const auto* spec : {&key.src, &key.dst}) {
      for (const auto& placement : spec->placements) {
        hash.add(static_cast<uint64_t>(placement.kind) << 8 | static_cast<uint64_t>(placement.op));
        hash.add(static_cast<uint64_t>(placement.dim) << 32 ^ static_cast<uint64_t>(placement.split_factor));
        hash.add(placement.mask);
      }
      for (const auto& axes : spec->order) {
        hash.add_all(axes);
      }
    }
    return hash.value();
  }
};

using ExecutionPtr = std::shared_ptr<const Execution>;

// What is known of a mesh; good until the DeviceMesh goes.
KnownMesh& known_mesh(py::handle device_mesh);

// The execution for this rank, which is inside the mesh. ValueError if there is no plan.
ExecutionPtr execution_of(ExecutionKey key, py::handle device_mesh, KnownMesh& known);
void forget_executions();

// A function of funcol.redistribution.
py::object python_function(const char* name);

template <const char* const& name>
py::object attribute(py::handle object) {
  static auto* const interned = PyUnicode_InternFromString(name);
  auto* const value = PyObject_GetAttr(object.ptr(), interned);
  if (value == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(value);
}

inline constexpr const char* kMesh = "mesh";
inline constexpr const char* kPlacements = "placements";
inline constexpr const char* kShardOrder = "shard_order";
inline constexpr const char* kTensorMeta = "tensor_meta";
inline constexpr const char* kShape = "shape";
inline constexpr const char* kStride = "stride";
inline constexpr const char* kDtype = "dtype";
inline constexpr const char* kDeviceType = "device_type";
inline constexpr const char* kSpec = "_spec";
inline constexpr const char* kLocalTensor = "_local_tensor";

struct __attribute__((visibility("hidden"))) SpecObjects {  // as pybind11's objects are
  explicit SpecObjects(py::handle spec)
      : mesh(attribute<kMesh>(spec)),
        placements(attribute<kPlacements>(spec)),
        order(attribute<kShardOrder>(spec)) {}

  Spec read() const { return {to_placements(placements), to_shard_order(order)}; }

  py::object mesh;
  py::object placements;
  py::object order;
};

// The spec's tensor_meta; ValueError naming `op` if it has none.
py::object meta_of(py::handle spec, const char* op);

// The shape of the whole tensor. A symbol becomes the number that it stands for, and a guard.
std::vector<int64_t> shape_of(py::handle spec, const char* op);

// Masks are told apart by address; for a plan it matters only which are the same.
void number_masks(ExecutionKey& key);

// The hooks call Python: they take the GIL. Both specs outlive them.
MaskHooks mask_hooks(const SpecObjects& src, const SpecObjects& dst);

}  // namespace funcol::python
