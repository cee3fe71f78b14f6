#include "transfer/dtensors/redistribute_local_tensor.h"

#include <string>
#include <utility>
#include <vector>

#include "async/dispatch_modes.h"
#include "pyobjects/callbacks.h"
#include "pyobjects/context_guard.h"
#include "pyobjects/tensors.h"
#include "pyobjects/without_gil.h"
#include "transfer/dtensors/transfer_cache.h"
#include "transfer/op_names.h"

namespace funcol::python {
namespace {

// Returns true if PyTorch correctly moves a tensor of `sizes` where the source gives this rank the sizes
// `held`: the tensor may also be cut over another mesh. PyTorch moves the tensor as it is, except that along
// unevenly cut dims it pads and trims by the shape of the full tensor.
bool stock_moves(at::IntArrayRef sizes, const std::vector<int64_t>& held, const TransferKey& key,
                 const Mesh& mesh) {
  const auto num_dims = std::ssize(key.shape);
  if (std::ssize(sizes) != num_dims) {
    return true;
  }
  for (const auto* spec : {&key.src, &key.dst}) {
    std::vector<int64_t> num_shards(num_dims, 1);
    for (int64_t axis = 0; axis < mesh.num_axes(); ++axis) {
      const auto& placement = spec->placements[axis];
      if (placement.is_shard() && key.src.placements[axis].is_shard()) {
        num_shards[placement.dim + (placement.dim < 0 ? num_dims : 0)] *= mesh.sizes[axis];
      }
    }
    for (int64_t dim = 0; dim < num_dims; ++dim) {
      if (sizes[dim] != held[dim] && key.shape[dim] % num_shards[dim] != 0) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

py::object debug_context(py::handle local, const SpecObjects& src, const SpecObjects& dst,
                         const Execution& execution, bool is_explicit) {
  if (!has_active_layers() || execution.steps().empty()) {
    return {};
  }
  return callback("note_redistribution")(local, src.placements, dst.placements, execution.trace(),
                                         is_explicit);
}

py::object redistribute_local(py::handle local, py::handle src_spec, py::handle dst_spec,
                              const LocalRedistribution& request) {
  const SpecObjects src(src_spec);
  const SpecObjects dst(dst_spec);
  TORCH_CHECK_NOT_IMPLEMENTED(are_equal(src.mesh, dst.mesh), "funcol::", kRedistributeLocalTensor,
                              ": the source is on ", std::string(py::repr(src.mesh)), ", the target on ",
                              std::string(py::repr(dst.mesh)),
                              ". Redistribution moves data within one DeviceMesh only.");
  auto& known = known_mesh(src.mesh);
  if (!known.coordinate.has_value()) {
    return py::reinterpret_borrow<py::object>(local);
  }
  const at::Tensor tensor = THPVariable_Unpack(local.ptr());
  TransferKey key{known.id,
                  src.read(),
                  dst.read(),
                  shape_of(src_spec, kRedistributeLocalTensor),
                  static_cast<int64_t>(tensor.itemsize()),
                  request.options.model,
                  request.options.max_bytes};
  const auto masks = make_mask_hooks(key, src, dst);
  const auto execution = find_program(key, within_mesh(src.mesh, known))->before;
  if (request.is_lenient && !execution->fits(tensor)) {
    const auto sizes = c10::asIntArrayRefSlowOpt(tensor.sym_sizes());
    if (!sizes.has_value() || stock_moves(*sizes, execution->shape_before(), key, known.mesh)) {
      return {};
    }
  }
  const ContextGuard noted(debug_context(local, src, dst, *execution, request.is_explicit));
  at::Tensor result;
  {
    const WithoutGil no_gil;
    result = execution->run(tensor, request.options.async_op, masks);
  }
  return to_python(std::move(result));
}

ExecutionPtr execution_between(py::handle src_spec, py::handle dst_spec, int64_t itemsize) {
  const SpecObjects src(src_spec);
  const SpecObjects dst(dst_spec);
  if (!are_equal(src.mesh, dst.mesh)) {
    return nullptr;
  }
  auto& known = known_mesh(src.mesh);
  try {
    const TransferKey key{known.id, src.read(), dst.read(), shape_of(src_spec, kRedistributeLocalTensor),
                          itemsize};
    return has_masks(key.src) || has_masks(key.dst) ? nullptr
                                                    : find_program(key, within_mesh(src.mesh, known))->before;
  } catch (const c10::NotImplementedError&) {
    return nullptr;
  } catch (const c10::ValueError&) {  // there is no plan: PyTorch says so, or moves the tensor by itself
    return nullptr;
  }
}

}  // namespace funcol::python
