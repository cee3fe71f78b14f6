// Redistribution of a local tensor from one DTensorSpec to another: one crossing from Python a call.
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/python_args.h"
#include "bindings/python_layout.h"
#include "bindings/without_gil.h"
#include "layout/hash.h"
#include "planner/lru_cache.h"
#include "redistribute/executor.h"
#include "redistribute/plan_cache.h"

namespace funcol::python {
namespace {

constexpr auto kOp = "redistribute_local_tensor";
constexpr size_t kNumExecutions = 1024;

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
struct Key {
  uint64_t mesh_id;
  Spec src;
  Spec dst;
  std::vector<int64_t> shape;
  int64_t itemsize;
  std::optional<CostModel> model;
  std::optional<int64_t> max_bytes;

  friend bool operator==(const Key&, const Key&) = default;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
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

// Both are touched with the GIL alone, which is their lock.
std::unordered_map<PyObject*, KnownMesh>& known_meshes() {
  static std::unordered_map<PyObject*, KnownMesh> meshes;
  return meshes;
}

LruCache<Key, ExecutionPtr, KeyHash>& executions() {
  static LruCache<Key, ExecutionPtr, KeyHash> cache(kNumExecutions);
  return cache;
}

py::object python_function(const char* name) {
  return py::module::import("funcol.redistribution").attr(name);
}

void forget_with(py::handle device_mesh) {
  auto* const address = device_mesh.ptr();
  py::weakref(device_mesh, py::cpp_function([address](py::handle reference) {
                known_meshes().erase(address);
                reference.dec_ref();
              }))
      .release();
}

KnownMesh& known_mesh(py::handle device_mesh) {
  static uint64_t num_meshes = 0;
  const auto& mesh = to_mesh(device_mesh);
  auto& meshes = known_meshes();
  const auto known = meshes.find(device_mesh.ptr());
  if (known != meshes.end() && known->second.mesh == mesh) {
    return known->second;
  }
  const py::object coordinate = device_mesh.attr("get_coordinate")();
  if (known == meshes.end()) {
    forget_with(device_mesh);
  }
  auto& entry = meshes[device_mesh.ptr()];
  entry = {++num_meshes, mesh, std::nullopt, {}};
  if (!coordinate.is_none()) {
    entry.coordinate = coordinate.cast<Coordinate>();
  }
  return entry;
}

void find_groups(const Plan& plan, py::handle device_mesh, KnownMesh& known) {
  for (const auto& step : plan.steps) {
    if (communicates(step.kind) && known.groups.count(step.axes) == 0) {
      static const auto* const axis_group = python_function("_axis_group").release().ptr();
      const auto found =
          py::handle(const_cast<PyObject*>(axis_group))(device_mesh, step.axes).cast<py::tuple>();  // NOLINT
      known.groups.emplace(step.axes,
                           AxisGroup{found[0].cast<std::string>(), found[1].cast<std::vector<int64_t>>()});
    }
  }
}

template <const char* const& name>
py::object attribute(py::handle object) {
  static auto* const interned = PyUnicode_InternFromString(name);
  auto* const value = PyObject_GetAttr(object.ptr(), interned);
  if (value == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(value);
}

constexpr const char* kMesh = "mesh";
constexpr const char* kPlacements = "placements";
constexpr const char* kShardOrder = "shard_order";
constexpr const char* kTensorMeta = "tensor_meta";
constexpr const char* kShape = "shape";

struct SpecObjects {
  explicit SpecObjects(py::handle spec)
      : mesh(attribute<kMesh>(spec)),
        placements(attribute<kPlacements>(spec)),
        order(attribute<kShardOrder>(spec)) {}

  Spec read() const { return {to_placements(placements), to_shard_order(order)}; }

  py::object mesh;
  py::object placements;
  py::object order;
};

std::vector<int64_t> shape_of(py::handle spec) {
  const auto meta = attribute<kTensorMeta>(spec);
  TORCH_CHECK_VALUE(
      !meta.is_none(), "funcol::", kOp,
      ": the source spec has no tensor_meta, so the shape of the whole tensor is not known. Pass a "
      "DTensorSpec with tensor_meta.");
  const auto shape = attribute<kShape>(meta);
  std::vector<int64_t> sizes;
  for (const auto& size : py::reinterpret_borrow<py::sequence>(shape)) {
    // A symbol becomes the number that it stands for, and a guard: a plan is made for sizes.
    sizes.push_back(PyLong_CheckExact(size.ptr()) ? PyLong_AsLongLong(size.ptr())
                                                  : py::int_(size).cast<int64_t>());
  }
  return sizes;
}

// Masks are told apart by address; for a plan it matters only which are the same.
void number_masks(Key& key) {
  std::vector<uint64_t> masks;
  for (auto* spec : {&key.src, &key.dst}) {
    for (auto& placement : spec->placements) {
      if (placement.mask != 0) {
        const auto found = std::find(masks.begin(), masks.end(), placement.mask);
        const auto number = static_cast<uint64_t>(found - masks.begin()) + 1;
        if (found == masks.end()) {
          masks.push_back(placement.mask);
        }
        placement.mask = number;
      }
    }
  }
}

std::shared_ptr<const Plan> make_plan(const Key& key, const Mesh& mesh) {
  try {
    const auto layout = [&](const char* side, const Spec& spec) {
      return without_strided_shards(make_layout(std::string("funcol::") + kOp + ": " + side, spec.placements,
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

ExecutionPtr execution_of(Key key, py::handle device_mesh, KnownMesh& known) {
  auto& cache = executions();
  if (const auto* execution = cache.get(key)) {
    return *execution;
  }
  const auto plan = make_plan(key, known.mesh);
  find_groups(*plan, device_mesh, known);
  auto execution = std::make_shared<const Execution>(*plan, known.groups, *known.coordinate);
  cache.put(std::move(key), execution);
  return execution;
}

// The hooks call Python: they take the GIL.
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

PyObject* redistribute_local_tensor(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6, "funcol::", kOp, ": ", count, " arguments, expected 6.");
  TORCH_CHECK_TYPE(THPVariable_Check(args[0]), "funcol::", kOp, ": got a ", Py_TYPE(args[0])->tp_name,
                   " where a tensor belongs.");
  const SpecObjects src(args[1]);
  const SpecObjects dst(args[2]);
  const auto same_mesh = PyObject_RichCompareBool(src.mesh.ptr(), dst.mesh.ptr(), Py_EQ);
  if (same_mesh < 0) {
    throw py::error_already_set();
  }
  TORCH_CHECK_NOT_IMPLEMENTED(same_mesh == 1, "funcol::", kOp, ": the source is on ",
                              std::string(py::repr(src.mesh)), ", the target on ",
                              std::string(py::repr(dst.mesh)),
                              ". Redistribution moves data within one DeviceMesh only.");
  auto& known = known_mesh(src.mesh);
  if (!known.coordinate.has_value()) {
    Py_INCREF(args[0]);
    return args[0];
  }
  const at::Tensor local = THPVariable_Unpack(args[0]);
  Key key{known.id, src.read(), dst.read(), shape_of(args[1]), static_cast<int64_t>(local.itemsize()),
          {},       {}};
  if (args[4] != Py_None) {
    key.model = py::handle(args[4]).cast<CostModel>();
  }
  if (args[5] != Py_None) {
    key.max_bytes = int_argument(args[5], "max_bytes", kOp);
  }
  MaskHooks masks;
  if (key.src.has_masks() || key.dst.has_masks()) {
    number_masks(key);
    masks = mask_hooks(src, dst);
  }
  const auto execution = execution_of(std::move(key), src.mesh, known);
  at::Tensor result;
  {
    const WithoutGil no_gil;
    result = execution->run(local, args[3] == Py_True, masks);
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

PyObject* forget_redistributions(PyObject* /*module*/, PyObject* /*unused*/) {
  executions().clear();
  forget_plans();
  Py_RETURN_NONE;
}

}  // namespace

void bind_redistribute(PyObject* module) {
  static PyMethodDef functions[] = {
      {"redistribute_local_tensor",
       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(redistribute_local_tensor)),  // NOLINT
       METH_FASTCALL, nullptr},
      {"forget_redistributions", forget_redistributions, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  if (PyModule_AddFunctions(module, functions) != 0) {
    throw python_error();
  }
}

}  // namespace funcol::python
