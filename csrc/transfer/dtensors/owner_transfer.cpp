#include "transfer/dtensors/owner_transfer.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/python_variable.h>

#include <limits>
#include <string>
#include <utility>

#include "pyobjects/attributes.h"
#include "pyobjects/dtensors.h"
#include "pyobjects/specs.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"
#include "transfer/dtensors/rank_transfer.h"
#include "transfer/op_names.h"
#include "transfer/run_batch.h"

namespace funcol::python {
namespace {

// The one mesh of a call, which contains this rank.
class CallMesh {
 public:
  KnownMesh& known(const py::object& mesh) {
    if (known_ == nullptr) {
      mesh_ = mesh;
      known_ = &known_mesh(mesh);
      TORCH_CHECK_VALUE(known_->coordinate.has_value(), "funcol::", kRedistributeMany,
                        ": this rank is not part of ", std::string(py::repr(mesh)),
                        ". Call it on the ranks of the mesh alone.");
      own_ = known_->mesh.place(*known_->coordinate);
    }
    TORCH_CHECK_NOT_IMPLEMENTED(mesh.is(mesh_) || are_equal(mesh, mesh_), "funcol::", kRedistributeMany,
                                ": one tensor is on ", std::string(py::repr(mesh)), ", the first one on ",
                                std::string(py::repr(mesh_)), ". Call it for each mesh.");
    return *known_;
  }

  bool owns(int64_t owner) const {
    TORCH_CHECK_VALUE(owner >= 0 && owner < known_->mesh.num_ranks(), "funcol::", kRedistributeMany,
                      ": Owned(", owner, ") is not a rank of the mesh, which has ", known_->mesh.num_ranks(),
                      ". Pass the number of a rank in the mesh, counted along its last axis first.");
    return owner == own_;
  }

 private:
  py::object mesh_;
  KnownMesh* known_ = nullptr;
  int64_t own_ = 0;
};

TransferKey key_of(const KnownMesh& known, Layout src, Layout dst, py::handle spec, int64_t owner) {
  TransferKey key{known.id, std::move(src), std::move(dst)};
  key.owner = owner;
  key.handles_all_owners = true;
  TORCH_CHECK_NOT_IMPLEMENTED(!has_masks(key.src) && !has_masks(key.dst) &&
                                  read_ints(attribute<"shape">(meta_of(spec, kRedistributeMany)), key.shape),
                              "funcol::", kRedistributeMany,
                              ": tensors with masks or symbolic sizes have no owners.");
  return key;
}

std::vector<at::Tensor> run(const std::vector<TransferItem>& items, const OwnerOptions& options) {
  const WithoutGil no_gil;
  return run_batch(items, options.async_op, options.max_bytes.value_or(std::numeric_limits<int64_t>::max()));
}

// Returns the full tensor on its owner, and an empty tensor on other ranks.
at::Tensor full_or_empty(py::handle object, bool owns, const TransferKey& key, py::handle spec,
                         const std::string& device, size_t index) {
  const auto dtype = to_dtype(attribute<"dtype">(meta_of(spec, kRedistributeMany)));
  if (!owns) {
    return at::empty({0}, at::TensorOptions(dtype).device(device));
  }
  TORCH_CHECK_VALUE(THPVariable_Check(object.ptr()), "funcol::", kRedistributeMany, ": tensor ", index,
                    " is owned here by rank ", key.owner, " of the mesh, but is ",
                    std::string(py::repr(object)), ". Pass the whole tensor.");
  const auto& full = THPVariable_Unpack(object.ptr());
  TORCH_CHECK_VALUE(full.sizes() == at::IntArrayRef(key.shape) && full.scalar_type() == dtype,
                    "funcol::", kRedistributeMany, ": tensor ", index, " is ", full.scalar_type(), " ",
                    full.sizes(), ", expected ", dtype, " ", at::IntArrayRef(key.shape),
                    ", as the shards were.");
  return full;
}

void check_target(const Layout& layout) {
  for (const auto& placement : layout.placements) {
    TORCH_CHECK_NOT_IMPLEMENTED(!placement.is_partial(), "funcol::", kRedistributeMany,
                                ": an owned tensor moves to shards and ", "replicas, and not to ",
                                to_string(placement), ". Pass placements that are not partial.");
  }
}

}  // namespace

py::list move_to_owners(const py::list& dtensors, const std::vector<int64_t>& owners,
                        const OwnerOptions& options) {
  CallMesh call_mesh;
  std::vector<TransferItem> items;
  for (size_t i = 0; i < owners.size(); ++i) {
    const py::handle dtensor = PyList_GET_ITEM(dtensors.ptr(), static_cast<Py_ssize_t>(i));
    const auto spec = attribute<"_spec">(dtensor);
    const SpecObjects objects(spec);
    auto& known = call_mesh.known(objects.mesh);
    call_mesh.owns(owners[i]);
    const auto& local = THPVariable_Unpack(attribute<"_local_tensor">(dtensor).ptr());
    auto key = key_of(known, objects.read(), {}, spec, owners[i]);
    key.itemsize = static_cast<int64_t>(local.itemsize());
    items.push_back({find_program(key, to_or_from_rank(objects.mesh, known)), local});
  }
  auto moved = run(items, options);
  py::list results(moved.size());
  for (size_t i = 0; i < moved.size(); ++i) {
    results[i] = call_mesh.owns(owners[i]) ? to_python(std::move(moved[i])) : py::none();
  }
  return results;
}

py::list move_from_owners(const py::list& full_tensors, const py::list& specs,
                          const std::vector<int64_t>& owners, const py::list& placements,
                          const OwnerOptions& options) {
  CallMesh call_mesh;
  std::vector<TransferItem> items;
  std::vector<py::object> targets;
  for (size_t i = 0; i < owners.size(); ++i) {
    const auto index = static_cast<Py_ssize_t>(i);
    const py::handle spec = PyList_GET_ITEM(specs.ptr(), index);
    const py::handle wanted = PyList_GET_ITEM(placements.ptr(), index);
    const SpecObjects objects(spec);
    auto& known = call_mesh.known(objects.mesh);
    const bool owns = call_mesh.owns(owners[i]);
    auto layout = wanted.is_none() ? objects.read() : Layout{to_placements(wanted), {}};
    check_target(layout);
    auto key = key_of(known, {}, std::move(layout), spec, owners[i]);
    const auto device = attribute<"device_type">(objects.mesh).cast<std::string>();
    auto full = full_or_empty(PyList_GET_ITEM(full_tensors.ptr(), index), owns, key, spec, device, i);
    key.itemsize = static_cast<int64_t>(full.itemsize());
    const auto make = to_or_from_rank(objects.mesh, known);
    if (wanted.is_none()) {
      targets.push_back(py::reinterpret_borrow<py::object>(spec));
      items.push_back({find_program(key, make), std::move(full)});
      continue;
    }
    const auto meta = meta_of(spec, kRedistributeMany);
    read_ints(attribute<"stride">(meta), key.stride);
    key.dtype = to_dtype(attribute<"dtype">(meta));
    auto transfer = find_transfer(key, spec, objects.mesh, wanted, py::none(), make);
    targets.push_back(copy_onto(transfer.spec, objects.mesh));
    items.push_back({std::move(transfer.program), std::move(full)});
  }
  auto moved = run(items, options);
  py::list results(moved.size());
  for (size_t i = 0; i < moved.size(); ++i) {
    results[i] = make_dtensor(to_python(std::move(moved[i])).ptr(), targets[i]);
  }
  return results;
}

}  // namespace funcol::python
