#include "transfer/dtensors/redistribute_local_tensor.h"

#include <ATen/ops/pow.h>

#include <algorithm>
#include <cmath>
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

// Replaces norm partials in the layouts of `key` by sums, of powers while `move` runs, and by replicas where
// it makes a norm partial. Returns false if the source has partials of another kind or order as well, or
// the target other partials than norms: their values are not sums of powers.
bool take_norms(TransferKey& key, const Mesh& mesh, OperandMove& move) {
  const auto is_norm = [](const Placement& placement) { return placement.is_norm(); };
  auto& held = key.src.placements;
  auto& wanted = key.dst.placements;
  const auto norm = std::ranges::find_if(held, is_norm);
  if (norm != held.end()) {
    const auto order = norm->norm;
    const auto is_other = [&](const auto& one) { return one.is_partial() && one.norm != order; };
    if (std::ranges::any_of(held, is_other) || std::ranges::any_of(wanted, is_other)) {
      return false;
    }
    move.order = order.value;
  }
  for (size_t axis = 0; axis < held.size(); ++axis) {
    if (wanted[axis].is_norm() && !held[axis].is_norm()) {
      move.divisors.push_back(std::pow(mesh.sizes[axis], 1 / wanted[axis].norm.value));
      wanted[axis] = Placement::replicate();
    }
    for (auto* one : {&held[axis], &wanted[axis]}) {
      if (one->is_norm()) {
        *one = Placement::partial();
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

at::Tensor OperandMove::run(const at::Tensor& local) const {
  const bool sums_powers = order != 0 && !execution->steps().empty();
  auto moved = execution->run(sums_powers ? local.pow(order) : local, /*async_op=*/false);
  if (sums_powers) {
    moved = moved.pow(1 / order);
  }
  for (const auto divisor : divisors) {
    moved = moved / divisor;
  }
  return moved;
}

std::optional<OperandMove> move_between(py::handle src_spec, py::handle dst_spec, int64_t itemsize) {
  const SpecObjects src(src_spec);
  const SpecObjects dst(dst_spec);
  if (!are_equal(src.mesh, dst.mesh)) {
    return std::nullopt;
  }
  auto& known = known_mesh(src.mesh);
  try {
    TransferKey key{known.id, src.read_with_norms(), dst.read_with_norms(),
                    shape_of(src_spec, kRedistributeLocalTensor), itemsize};
    OperandMove move;
    if (has_masks(key.src) || has_masks(key.dst) || !take_norms(key, known.mesh, move)) {
      return std::nullopt;
    }
    move.execution = find_program(key, within_mesh(src.mesh, known))->before;
    return move.execution == nullptr ? std::nullopt : std::optional(std::move(move));
  } catch (const c10::NotImplementedError&) {
    return std::nullopt;
  } catch (const c10::ValueError&) {  // there is no plan: PyTorch says so, or moves the tensor by itself
    return std::nullopt;
  }
}

}  // namespace funcol::python
