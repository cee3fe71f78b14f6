// Redistribution of many tensors at once: one crossing from Python for all of them.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "async/layers.h"
#include "bindings/bindings.h"
#include "bindings/dtensor_objects.h"
#include "bindings/fast_functions.h"
#include "bindings/python_args.h"
#include "bindings/redistribution_specs.h"
#include "bindings/without_gil.h"
#include "redistribute/plan_cache.h"
#include "redistribute/run_many.h"

namespace funcol::python {
namespace {

constexpr auto kManyOp = "redistribute_many";

// What tensors that go together may take, where the caller sets no bound: the copies into and out of one
// buffer are worth it for small tensors alone.
constexpr int64_t kTogetherBytes = int64_t{256} << 20;

// The options that all tensors of a call share.
struct Options {
  Options(PyObject* async_op, PyObject* cost_model, PyObject* bound) : async_op(async_op == Py_True) {
    if (cost_model != Py_None) {
      model = py::handle(cost_model).cast<CostModel>();
    }
    if (bound != Py_None) {
      max_bytes = int_argument(bound, "max_bytes", kManyOp);
    }
  }

  bool async_op;
  std::optional<CostModel> model;
  std::optional<int64_t> max_bytes;
};

// The tensors of a call, all on the mesh of the first.
class Many {
 public:
  Many(const Options& options, Py_ssize_t count) : options_(options) { items_.reserve(count); }

  // False on a rank outside of the mesh, which keeps its tensors.
  bool is_inside(const py::object& mesh) {
    if (known_ == nullptr) {
      mesh_ = mesh;
      known_ = &known_mesh(mesh);
    } else if (!mesh.is(mesh_)) {
      check_same_mesh(mesh, "tensor " + std::to_string(num_seen_) + " is on ");
    }
    ++num_seen_;
    return known_->coordinate.has_value();
  }

  void check_same_mesh(const py::object& mesh, const std::string& where) const {
    const auto is_same = mesh.is(mesh_) ? 1 : PyObject_RichCompareBool(mesh.ptr(), mesh_.ptr(), Py_EQ);
    if (is_same < 0) {
      throw py::error_already_set();
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        is_same == 1, "funcol::", kManyOp, ": ", where, std::string(py::repr(mesh)), ", the first one on ",
        std::string(py::repr(mesh_)),
        ". Redistribution moves data within one DeviceMesh only: call it for each mesh.");
  }

  ExecutionKey key(Layout src, Layout dst, int64_t itemsize) const {
    return {known_->id, std::move(src), std::move(dst), {}, itemsize, options_.model, options_.max_bytes};
  }

  ExecutionPtr find_execution(ExecutionKey key) { return execution_of(std::move(key), mesh_, *known_); }

  Target find_target(TargetKey key, py::handle src_spec, py::handle placements) {
    return python::find_target(std::move(key), src_spec, mesh_, *known_, placements);
  }

  // Of masks, the specs must outlive this.
  void add(ExecutionPtr execution, const at::Tensor& local, MaskHooks masks = {}) {
    items_.push_back({std::move(execution), local, std::move(masks)});
  }

  std::vector<at::Tensor> run() const {
    const WithoutGil no_gil;
    return run_many(items_, options_.async_op, options_.max_bytes.value_or(kTogetherBytes));
  }

 private:
  const Options& options_;
  std::vector<ManyItem> items_;
  py::object mesh_;
  KnownMesh* known_ = nullptr;
  size_t num_seen_ = 0;
};

py::list wrapped(std::vector<at::Tensor> tensors) {
  py::list list(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(std::move(tensors[i])));
  }
  return list;
}

// (locals, source specs, target specs, async_op, model, max_bytes) -> locals; NotImplemented if they have to
// go one by one, for a layer that watches.
PyObject* redistribute_local_tensors(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6, "funcol::", kManyOp, ": ", count, " arguments, expected 6.");
  if (has_active_layers()) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const auto num_tensors = PyList_GET_SIZE(args[0]);
  const Options options(args[3], args[4], args[5]);
  Many many(options, num_tensors);
  std::vector<std::unique_ptr<SpecObjects>> specs;  // where masks find them
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    const py::handle src_spec = PyList_GET_ITEM(args[1], i);
    specs.push_back(std::make_unique<SpecObjects>(src_spec));
    const auto& src = *specs.back();
    specs.push_back(std::make_unique<SpecObjects>(PyList_GET_ITEM(args[2], i)));
    const auto& dst = *specs.back();
    const bool is_inside = many.is_inside(src.mesh);
    many.check_same_mesh(dst.mesh, "target " + std::to_string(i) + " is on ");
    if (!is_inside) {
      continue;
    }
    const auto& local = THPVariable_Unpack(PyList_GET_ITEM(args[0], i));
    auto key = many.key(src.read(), dst.read(), static_cast<int64_t>(local.itemsize()));
    key.shape = shape_of(src_spec, kManyOp);
    MaskHooks masks;
    if (has_masks(key)) {
      number_masks(key);
      masks = mask_hooks(src, dst);
    }
    many.add(many.find_execution(std::move(key)), local, std::move(masks));
  }
  auto results = many.run();
  if (results.empty()) {
    return PyList_GetSlice(args[0], 0, num_tensors);
  }
  return wrapped(std::move(results)).release().ptr();
  END_HANDLE_TH_ERRORS
}

// Placements that were read, for as long as the next ones are the same object.
class LastPlacements {
 public:
  const std::vector<Placement>& read(const py::object& placements) {
    if (!placements.is(object_)) {
      placements_ = to_placements(placements);
      object_ = placements;
    }
    return placements_;
  }

 private:
  py::object object_;
  std::vector<Placement> placements_;
};

// True if a gradient is to be recorded. TypeError for what is no DTensor.
bool check_dtensors(PyObject* list) {
  bool needs_gradient = false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    auto* const object = PyList_GET_ITEM(list, i);
    TORCH_CHECK_TYPE(PyObject_TypeCheck(object, dtensor_type()), "funcol::", kManyOp, ": got a ",
                     Py_TYPE(object)->tp_name, ", expected DTensors.");
    needs_gradient = needs_gradient || THPVariable_Unpack(object).requires_grad();
  }
  return needs_gradient && at::GradMode::is_enabled();
}

// (DTensors, tuple of placements for each, async_op, model, max_bytes) -> DTensors. None if a gradient is to
// be recorded; NotImplemented if they have to go one by one: sizes are symbols, there are masks, a layer
// watches.
PyObject* redistribute_many(PyObject* /*module*/, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 5, "funcol::", kManyOp, ": ", count, " arguments, expected 5.");
  if (check_dtensors(args[0])) {
    Py_RETURN_NONE;
  }
  if (has_active_layers()) {
    Py_RETURN_NOTIMPLEMENTED;
  }
  const auto num_tensors = PyList_GET_SIZE(args[0]);
  const Options options(args[2], args[3], args[4]);
  Many many(options, num_tensors);
  LastPlacements src_placements;
  LastPlacements dst_placements;
  std::vector<py::object> specs;
  specs.reserve(num_tensors);
  std::vector<py::object> locals;
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    const py::handle dtensor = PyList_GET_ITEM(args[0], i);
    const auto placements = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(args[1], i));
    const auto spec = attribute<"_spec">(dtensor);
    const SpecObjects src(spec);
    auto local = attribute<"_local_tensor">(dtensor);
    if (!many.is_inside(src.mesh)) {
      specs.push_back(python_function("_target")(spec, src.mesh, placements, py::none(), py::none()));
      locals.push_back(std::move(local));
      continue;
    }
    const auto& tensor = THPVariable_Unpack(local.ptr());
    const auto meta = meta_of(spec, kManyOp);
    const auto dtype = attribute<"dtype">(meta);
    TargetKey key{many.key({src_placements.read(src.placements), to_shard_order(src.order)},
                           {dst_placements.read(placements), {}}, static_cast<int64_t>(tensor.itemsize())),
                  {},
                  dtype.ptr()};
    if (has_masks(key.key) || !read_ints(attribute<"shape">(meta), key.key.shape) ||
        !read_ints(attribute<"stride">(meta), key.stride)) {
      Py_RETURN_NOTIMPLEMENTED;
    }
    auto target = many.find_target(std::move(key), spec, placements);
    many.add(std::move(target.execution), tensor);
    specs.push_back(std::move(target.spec));
  }
  auto results = many.run();
  py::list dtensors(num_tensors);
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    const auto local = locals.empty()
                           ? py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(results[i])))
                           : locals[i];
    PyList_SET_ITEM(dtensors.ptr(), i, make_dtensor(local.ptr(), specs[i]).release().ptr());
  }
  return dtensors.release().ptr();
  END_HANDLE_TH_ERRORS
}

PyObject* forget_redistributions(PyObject* /*module*/, PyObject* /*unused*/) {
  forget_targets();
  forget_executions();
  forget_plans();
  Py_RETURN_NONE;
}

}  // namespace

void bind_redistribute_many(PyObject* module) {
  static PyMethodDef functions[] = {
      fast<redistribute_local_tensors>("redistribute_local_tensors"),
      fast<redistribute_many>("redistribute_many"),
      {"forget_redistributions", forget_redistributions, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  if (PyModule_AddFunctions(module, functions) != 0) {
    throw python_error();
  }
}

}  // namespace funcol::python
