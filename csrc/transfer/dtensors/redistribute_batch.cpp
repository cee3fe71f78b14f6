#include "transfer/dtensors/redistribute_batch.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "async/dispatch_modes.h"
#include "pyobjects/attributes.h"
#include "pyobjects/context_guard.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/layouts.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"
#include "transfer/dtensors/cross_mesh.h"
#include "transfer/dtensors/redistribute_local_tensor.h"
#include "transfer/op_names.h"
#include "transfer/run_batch.h"
#include "transfer/run_mesh_changes.h"

namespace funcol::python {
namespace {

// The tensors of a call, all on the mesh of the first, and going to the mesh that the first goes to.
class Batch {
 public:
  Batch(const RedistributionOptions& options, Py_ssize_t count) : options_(options) { items_.reserve(count); }

  // Checks the meshes of the next tensor, which is added before another one enters.
  void check_meshes(const py::object& src_mesh, const py::object& dst_mesh) {
    if (src_ == nullptr) {
      src_mesh_ = src_mesh;
      dst_mesh_ = dst_mesh;
      src_ = &known_mesh(src_mesh);
      dst_ = are_equal(src_mesh, dst_mesh) ? src_ : &known_mesh(dst_mesh);
      make_ = is_within_mesh() ? within_mesh(src_mesh_, *src_)
                               : between_meshes(src_mesh_, *src_, dst_mesh_, *dst_);
    }
    check_same_mesh(src_mesh, src_mesh_, "tensor");
    check_same_mesh(dst_mesh, dst_mesh_, "target");
  }

  bool is_within_mesh() const { return dst_ == src_; }
  const MakeProgram& make() const { return make_; }

  TransferKey key(Layout src, Layout dst, int64_t itemsize) const {
    TransferKey key{src_->id, std::move(src), std::move(dst),    {},
                    itemsize, options_.model, options_.max_bytes};
    if (!is_within_mesh()) {
      key.dst_mesh_id = dst_->id;
      key.dst_model = options_.dst_model;
    }
    return key;
  }

  // Adds a tensor. `masks` refer to specs, which must outlive this object.
  void add(TransferProgramPtr program, const at::Tensor& local, MaskHooks masks = {}) {
    if (const auto& shape = program->shape_before) {
      TORCH_CHECK_VALUE(local.sizes() == *shape, "funcol::", kRedistribute, ": the local tensor has shape ",
                        local.sizes(), ", but this rank holds ", at::IntArrayRef(*shape), " of it under ",
                        program->src, ". Pass the shard that belongs to the source spec.");
    }
    items_.push_back({std::move(program), local, std::move(masks)});
  }

  std::vector<at::Tensor> run() {
    const WithoutGil no_gil;
    const auto most = options_.max_bytes.value_or(kTogetherBytes);
    return is_within_mesh() ? run_batch(items_, options_.async_op, most)
                            : run_mesh_changes(std::move(items_), options_.async_op, most);
  }

 private:
  void check_same_mesh(const py::object& mesh, const py::object& first, const char* what) const {
    TORCH_CHECK_NOT_IMPLEMENTED(mesh.is(first) || are_equal(mesh, first), "funcol::", kRedistributeMany, ": ",
                                what, " ", items_.size(), " is on ", std::string(py::repr(mesh)),
                                ", the first one on ", std::string(py::repr(first)),
                                ". Tensors that move together are on one DeviceMesh: call it for each mesh.");
  }

  const RedistributionOptions& options_;
  std::vector<TransferItem> items_;
  py::object src_mesh_;
  py::object dst_mesh_;
  KnownMesh* src_ = nullptr;
  KnownMesh* dst_ = nullptr;
  MakeProgram make_;
};

}  // namespace

py::list redistribute_locals(const py::list& locals, const py::list& src_specs, const py::list& dst_specs,
                             const RedistributionOptions& options, bool is_explicit) {
  const auto num_tensors = PyList_GET_SIZE(locals.ptr());
  Batch batch(options, num_tensors);
  std::vector<std::unique_ptr<SpecObjects>> specs;  // at stable addresses, for masks
  std::vector<py::object> contexts;
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    const py::handle src_spec = PyList_GET_ITEM(src_specs.ptr(), i);
    specs.push_back(std::make_unique<SpecObjects>(src_spec));
    const auto& src = *specs.back();
    specs.push_back(std::make_unique<SpecObjects>(PyList_GET_ITEM(dst_specs.ptr(), i)));
    const auto& dst = *specs.back();
    batch.check_meshes(src.mesh, dst.mesh);
    const py::handle local = PyList_GET_ITEM(locals.ptr(), i);
    const auto& tensor = THPVariable_Unpack(local.ptr());
    auto key = batch.key(src.read(), dst.read(), static_cast<int64_t>(tensor.itemsize()));
    key.shape = shape_of(src_spec, kRedistributeMany);
    auto masks = make_mask_hooks(key, src, dst);
    auto program = find_program(key, batch.make());
    if (batch.is_within_mesh() && program->before) {
      contexts.push_back(debug_context(local, src, dst, *program->before, is_explicit));
    }
    batch.add(std::move(program), tensor, std::move(masks));
  }
  for (auto& context : contexts) {
    const ContextGuard noted(std::move(context));
  }
  return to_python(batch.run());
}

py::object redistribute_many(const py::list& dtensors, py::handle device_mesh, const py::list& placements,
                             py::handle order, const RedistributionOptions& options) {
  const auto num_tensors = PyList_GET_SIZE(dtensors.ptr());
  Batch batch(options, num_tensors);
  PlacementMemo src_placements;
  PlacementMemo dst_placements;
  const auto wanted_order = to_shard_order(order);
  std::vector<py::object> specs;
  specs.reserve(num_tensors);
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    const py::handle dtensor = PyList_GET_ITEM(dtensors.ptr(), i);
    const auto wanted = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(placements.ptr(), i));
    const auto spec = attribute<"_spec">(dtensor);
    const SpecObjects src(spec);
    const auto mesh = device_mesh.is_none() ? src.mesh : py::reinterpret_borrow<py::object>(device_mesh);
    batch.check_meshes(src.mesh, mesh);
    const auto local = attribute<"_local_tensor">(dtensor);
    const auto& tensor = THPVariable_Unpack(local.ptr());
    const auto meta = meta_of(spec, kRedistributeMany);
    auto key =
        batch.key({src_placements.read(src.placements), to_shard_order(src.order)},
                  {dst_placements.read(wanted), wanted_order}, static_cast<int64_t>(tensor.itemsize()));
    key.dtype = to_dtype(attribute<"dtype">(meta));
    if (has_masks(key.src) || has_masks(key.dst) || !read_ints(attribute<"shape">(meta), key.shape) ||
        !read_ints(attribute<"stride">(meta), key.stride)) {
      return {};
    }
    auto transfer = find_transfer(key, spec, mesh, wanted, order, batch.make());
    batch.add(std::move(transfer.program), tensor);
    specs.push_back(copy_onto(transfer.spec, mesh));
  }
  if (has_active_layers()) {
    return py::none();
  }
  auto results = batch.run();
  py::list redistributed(num_tensors);
  for (Py_ssize_t i = 0; i < num_tensors; ++i) {
    const auto local = to_python(std::move(results[i]));
    PyList_SET_ITEM(redistributed.ptr(), i, make_dtensor(local.ptr(), specs[i]).release().ptr());
  }
  return redistributed;  // NOLINT: no move, pybind11 converts
}

}  // namespace funcol::python
