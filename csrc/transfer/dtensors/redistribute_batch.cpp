#include "transfer/dtensors/redistribute_batch.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "async/dispatch_modes.h"
#include "pyobjects/attributes.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/context_guard.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/layouts.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"
#include "transfer/dtensors/redistribute_local_tensor.h"
#include "transfer/op_names.h"
#include "transfer/run_batch.h"

namespace funcol::python {
namespace {

// The tensors of a call, all on the mesh of the first.
class Many {
 public:
  Many(const RedistributionOptions& options, Py_ssize_t count) : options_(options) { items_.reserve(count); }

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
    TORCH_CHECK_NOT_IMPLEMENTED(
        are_equal(mesh, mesh_), "funcol::", kRedistributeMany, ": ", where, std::string(py::repr(mesh)),
        ", the first one on ", std::string(py::repr(mesh_)),
        ". Redistribution moves data within one DeviceMesh only: call it for each mesh.");
  }

  TransferKey key(Layout src, Layout dst, int64_t itemsize) const {
    return {known_->id, std::move(src), std::move(dst), {}, itemsize, options_.model, options_.max_bytes};
  }

  ProgramPtr find_program(const TransferKey& key) {
    return python::find_program(key, within_mesh(mesh_, *known_));
  }

  RememberedTransfer find_transfer(const TransferKey& key, py::handle src_spec, py::handle placements) {
    return python::find_transfer(key, src_spec, mesh_, placements, py::none(), within_mesh(mesh_, *known_));
  }

  // `masks` refer to specs, which must outlive this object.
  void add(ProgramPtr program, const at::Tensor& local, MaskHooks masks = {}) {
    items_.push_back({std::move(program), local, std::move(masks)});
  }

  std::vector<at::Tensor> run() const {
    const WithoutGil no_gil;
    return run_batch(items_, options_.async_op, options_.max_bytes.value_or(kTogetherBytes));
  }

 private:
  const RedistributionOptions& options_;
  std::vector<TransferItem> items_;
  py::object mesh_;
  KnownMesh* known_ = nullptr;
  size_t num_seen_ = 0;
};

}  // namespace

py::list redistribute_locals(const py::list& locals, const py::list& src_specs, const py::list& dst_specs,
                             const RedistributionOptions& options, bool is_explicit) {
  const auto num_tensors = PyList_GET_SIZE(locals.ptr());
  Many many(options, num_tensors);
  std::vector<std::unique_ptr<SpecObjects>> specs;  // at stable addresses, for masks
  std::vector<py::object> contexts;
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    const py::handle src_spec = PyList_GET_ITEM(src_specs.ptr(), i);
    specs.push_back(std::make_unique<SpecObjects>(src_spec));
    const auto& src = *specs.back();
    specs.push_back(std::make_unique<SpecObjects>(PyList_GET_ITEM(dst_specs.ptr(), i)));
    const auto& dst = *specs.back();
    const bool is_inside = many.is_inside(src.mesh);
    many.check_same_mesh(dst.mesh, "target " + std::to_string(i) + " is on ");
    if (!is_inside) {
      continue;
    }
    const auto& local = THPVariable_Unpack(PyList_GET_ITEM(locals.ptr(), i));
    auto key = many.key(src.read(), dst.read(), static_cast<int64_t>(local.itemsize()));
    key.shape = shape_of(src_spec, kRedistributeMany);
    auto masks = take_masks(key, src, dst);
    auto program = many.find_program(key);
    contexts.push_back(
        debug_context(PyList_GET_ITEM(locals.ptr(), i), src, dst, *program->before, is_explicit));
    many.add(std::move(program), local, std::move(masks));
  }
  for (auto& context : contexts) {
    const ContextGuard noted(std::move(context));
  }
  auto results = many.run();
  if (results.empty()) {
    return py::reinterpret_steal<py::list>(PyList_GetSlice(locals.ptr(), 0, num_tensors));
  }
  return to_python(std::move(results));
}

py::object redistribute_many(const py::list& dtensors, const py::list& placements,
                             const RedistributionOptions& options) {
  const auto num_tensors = PyList_GET_SIZE(dtensors.ptr());
  Many many(options, num_tensors);
  PlacementMemo src_placements;
  PlacementMemo dst_placements;
  std::vector<py::object> specs;
  specs.reserve(num_tensors);
  std::vector<py::object> locals;
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    const py::handle dtensor = PyList_GET_ITEM(dtensors.ptr(), i);
    const auto wanted = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(placements.ptr(), i));
    const auto spec = attribute<"_spec">(dtensor);
    const SpecObjects src(spec);
    auto local = attribute<"_local_tensor">(dtensor);
    if (!many.is_inside(src.mesh)) {
      specs.push_back(callback("redistribution_target")(spec, src.mesh, wanted, py::none(), py::none()));
      locals.push_back(std::move(local));
      continue;
    }
    const auto& tensor = THPVariable_Unpack(local.ptr());
    const auto meta = meta_of(spec, kRedistributeMany);
    auto key = many.key({src_placements.read(src.placements), to_shard_order(src.order)},
                        {dst_placements.read(wanted), {}}, static_cast<int64_t>(tensor.itemsize()));
    key.dtype = to_dtype(attribute<"dtype">(meta));
    if (has_masks(key.src) || has_masks(key.dst) || !read_ints(attribute<"shape">(meta), key.shape) ||
        !read_ints(attribute<"stride">(meta), key.stride)) {
      return {};
    }
    auto transfer = many.find_transfer(key, spec, wanted);
    many.add(std::move(transfer.program), tensor);
    specs.push_back(copy_onto(transfer.spec, src.mesh));
  }
  if (has_active_layers()) {
    return py::none();
  }
  auto results = many.run();
  py::list redistributed(num_tensors);
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    const auto local = locals.empty() ? to_python(std::move(results[i])) : locals[i];
    PyList_SET_ITEM(redistributed.ptr(), i, make_dtensor(local.ptr(), specs[i]).release().ptr());
  }
  return redistributed;  // NOLINT: no move, pybind11 converts
}

}  // namespace funcol::python
