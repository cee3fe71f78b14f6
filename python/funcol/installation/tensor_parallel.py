"""Parts of ``torch.distributed.tensor.parallel`` that are wrong for some programs.

``log_softmax`` and ``nll_loss`` under ``loss_parallel``: PyTorch computes both gradients in the backward pass
of ``nll_loss``, and passes the gradient of ``log_softmax`` on as it is. So whatever else reads the
log-probabilities (label smoothing, an entropy, a KL divergence, a weighted sum) gets a wrong gradient,
silently, and so does an ``nll_loss`` without a ``log_softmax``. Here each operator computes its own gradient.
``log_softmax`` needs the sum of its gradient over the classes: ``nll_loss`` knows that of its own gradient,
which says so; that of any other takes an all_reduce, of one value for each row.

Uneven shards between a ``ColwiseParallel`` and a ``RowwiseParallel`` layer: ``RowwiseParallel`` makes a
DTensor of its input by ``DTensor.from_local``, which assumes that the shards of all ranks are equally large.
If the number of features does not divide, each rank then has another global size, and the program ends in an
error or hangs. The layer's weight has the true size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import _C
from ..collectives.functions import all_reduce
from ..collectives.import_hooks import InstallOnImport
from ..redistribution.local_redistribute import make_dtensor
from ..redistribution.specs import dense_strides_like, spec_of, spec_of_shape
from . import patching, user_patches

_LOSS = "torch.distributed.tensor.parallel.loss"
_STYLES = "torch.distributed.tensor.parallel.style"


class _Classes(NamedTuple):
    """The classes of a DTensor, which one axis of its mesh cuts."""

    dim: int
    group: tuple[DeviceMesh, int]  # the mesh and the axis
    begin: int  # of this rank's classes

    @staticmethod
    def of(x: DTensor, dim: int) -> _Classes:
        """Raises ValueError, as PyTorch does, unless one axis cuts the classes."""
        mesh = x._spec.mesh
        axis = sys.modules[_LOSS]._find_all_reduce_mesh_dim(x._spec.placements, dim)
        classes_a_rank = -(-x.shape[dim] // mesh.size(axis))
        return _Classes(dim, (mesh, axis), mesh.get_coordinate()[axis] * classes_a_rank)  # type: ignore[index]


def _log_softmax(_op: OpOverload, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> DTensor:
    """Handles ``_log_softmax(self, dim, half_to_float)``."""
    x, dim, half_to_float = args
    dim %= x.ndim
    group = _Classes.of(x, dim).group
    local = _widened(x._local_tensor).contiguous()
    if local.shape[dim] > 0:
        peak = local.amax(dim, keepdim=True)
    else:  # this rank has no class
        peak = local.sum(dim, keepdim=True).fill_(-math.inf)
    shifted = local - all_reduce(peak, "max", group)
    total = all_reduce(shifted.exp().sum(dim, keepdim=True), "sum", group)
    result = shifted - total.log()
    if not half_to_float:
        result = result.to(x.dtype)
    if result.dtype is x.dtype and x.is_contiguous():
        return _like(x, result)
    spec = spec_of_shape(x._spec.mesh, x._spec.placements, x.shape, result)
    return make_dtensor(result, spec, requires_grad=False)


def _nll_loss_forward(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[DTensor, Tensor]:
    """Handles ``nll_loss_forward`` and ``nll_loss2d_forward``: ``(self, target, weight, reduction,
    ignore_index)``. PyTorch's handler serves meshes of several axes, in releases that have them."""
    loss = sys.modules[_LOSS]
    log_probs, target, weight, reduction, ignore_index = args
    mesh, placements = log_probs._spec.mesh, (Replicate(),)
    if mesh.ndim > 1:
        return loss._nll_loss_forward_handler(op, args, kwargs)  # type: ignore[no-any-return]
    classes = _Classes.of(log_probs, 1 if log_probs.ndim > 1 else 0)
    target = _local_of(target, placements, mesh)
    weights = _weights_of_rows(target, weight, ignore_index, mesh)
    local = log_probs._local_tensor
    column, is_here = _find_targets(target, ignore_index, local, classes)
    if local.shape[classes.dim] > 0:
        own = local.gather(classes.dim, column)
        if weight is not None:
            own = own * weights.unsqueeze(classes.dim)
        own = torch.where(is_here, -own, 0)
    else:
        own = local.new_zeros(column.shape)
    result = all_reduce(own, "sum", classes.group).squeeze(classes.dim)
    if reduction == loss.Reduction.NONE.value and log_probs.ndim > 1:
        total_weight = local.new_zeros(())
    else:
        total_weight = weights.sum() if weight is not None else weights.sum().to(local)
    if reduction == loss.Reduction.SUM.value:
        result = result.sum()
    elif reduction == loss.Reduction.MEAN.value:
        result = result.sum() / total_weight
    return make_dtensor(result, spec_of(mesh, placements, result), requires_grad=False), total_weight


def _nll_loss_backward(_op: OpOverload, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> DTensor:
    """Handles ``nll_loss_backward`` and ``nll_loss2d_backward``: ``(grad_output, self, target, weight,
    reduction, ignore_index, total_weight)``. The rank that holds a row's target class holds its gradient."""
    loss = sys.modules[_LOSS]
    grad, log_probs, target, weight, reduction, ignore_index, total_weight = args
    spec = log_probs._spec
    classes = _Classes.of(log_probs, 1 if log_probs.ndim > 1 else 0)
    dim = classes.dim
    placements = loss._skip_dim(loss.replicate_reduction_dims(spec.placements, [dim]), dim)
    target = _local_of(target, placements, spec.mesh)
    wanted = placements if grad.ndim else (Replicate(),) * spec.mesh.ndim
    grad = (grad if grad.placements == wanted else grad.redistribute(spec.mesh, wanted))._local_tensor
    if reduction == loss.Reduction.MEAN.value:
        grad = grad / total_weight
    if weight is not None:
        grad = grad * _weights_of_rows(target, weight, ignore_index, spec.mesh)
    local = log_probs._local_tensor
    # The sum of each row's gradient over the classes, in the dtype of the gradient.
    totals = torch.where(target != ignore_index, -grad, 0).to(local.dtype).unsqueeze(dim)
    column, is_here = _find_targets(target, ignore_index, local, classes)
    result = torch.zeros_like(local)
    if local.shape[dim] > 0:
        result.scatter_(dim, column, torch.where(is_here, totals, 0))
    gradient = _like(log_probs, result)
    if type(result) is Tensor:
        gradient._funcol_totals = (_versions_of(gradient), totals)  # type: ignore[attr-defined]
    return gradient


def _log_softmax_backward(_op: OpOverload, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> DTensor:
    """Handles ``_log_softmax_backward_data(grad_output, output, dim, input_dtype)``."""
    grad, output, dim, input_dtype = args
    spec = output._spec
    dim %= output.ndim
    group = _Classes.of(output, dim).group
    versions, totals = getattr(grad, "_funcol_totals", (None, None))
    if grad.placements != spec.placements:
        grad, versions = grad.redistribute(spec.mesh, spec.placements), None
    local = _widened(grad._local_tensor)
    if totals is None or versions != _versions_of(grad):
        totals = all_reduce(local.sum(dim, keepdim=True), "sum", group)
    return _like(output, (local - torch.exp(output._local_tensor) * totals).to(input_dtype))


def _versions_of(x: DTensor) -> tuple[int, int]:
    return x._version, x._local_tensor._version


def _widened(local: Tensor) -> Tensor:
    return local.float() if local.dtype in (torch.float16, torch.bfloat16) else local


def _local_of(tensor: Tensor, placements: tuple[Placement, ...], mesh: DeviceMesh) -> Tensor:
    """Returns the local tensor of a DTensor of ``placements``, or of a plain tensor that stands for one."""
    if (
        isinstance(tensor, DTensor)
        or mesh.device_type != tensor.device.type
        or not all(placement.is_replicate() for placement in placements)
    ):
        tensor = sys.modules[_LOSS]._cast_to_dtensor(tensor, placements, mesh)._local_tensor
    return tensor


def _weights_of_rows(target: Tensor, weight: Tensor | None, ignore_index: int, mesh: DeviceMesh) -> Tensor:
    """Returns the weight of each row's target class; 0 for ignored rows."""
    is_counted = target != ignore_index
    if weight is None:
        return is_counted
    weight = _local_of(weight, (Replicate(),) * mesh.ndim, mesh)
    return torch.where(is_counted, weight[torch.where(is_counted, target, 0)], 0)


def _find_targets(
    target: Tensor, ignore_index: int, local: Tensor, classes: _Classes
) -> tuple[Tensor, Tensor]:
    """Returns each row's target class among this rank's, or 0, and whether it is among them."""
    target = target.unsqueeze(classes.dim)
    column = target - classes.begin
    is_here = (target != ignore_index) & (column >= 0) & (column < local.shape[classes.dim])
    return torch.where(is_here, column, 0), is_here


def _like(of: DTensor, local: Tensor) -> DTensor:
    """Returns ``local`` as a DTensor with the mesh, placements and global shape of ``of``."""
    return make_dtensor(local, _C.copy_spec(of._spec), requires_grad=False)


def _install_loss(loss: Any) -> Callable[[], None]:
    ours = {
        torch.ops.aten._log_softmax.default: _log_softmax,
        torch.ops.aten._log_softmax_backward_data.default: _log_softmax_backward,
        torch.ops.aten.nll_loss_forward.default: _nll_loss_forward,
        torch.ops.aten.nll_loss2d_forward.default: _nll_loss_forward,
        torch.ops.aten.nll_loss_backward.default: _nll_loss_backward,
        torch.ops.aten.nll_loss2d_backward.default: _nll_loss_backward,
    }
    theirs = loss.customized_loss_ops
    if any(patching.own_function(theirs.get(op)) is None for op in ours):
        return lambda: None  # a program has registered handlers of its own
    return patching.set_entries(theirs, ours)


def _prepare_rowwise_input(
    input_layouts: tuple[Placement, ...],
    desired_input_layouts: tuple[Placement, ...],
    mod: nn.Module,
    inputs: tuple[Any, ...],
    device_mesh: DeviceMesh,
) -> Any:
    """Replaces ``RowwiseParallel._prepare_input_fn`` for inputs ``(..., in_features of this rank)`` that are
    uneven shards. Returns ``NotImplemented`` for all others."""
    weight, local = getattr(mod, "weight", None), inputs[0]
    if (
        not isinstance(mod, nn.Linear)
        or not isinstance(weight, DTensor)
        or weight.shape[1] % device_mesh.size() == 0
        or weight.placements != (Shard(1),)
        or isinstance(local, DTensor)
        or input_layouts not in ((Shard(-1),), (Shard(local.ndim - 1),))
        or weight.to_local().shape[1] != local.shape[-1]
    ):
        return NotImplemented
    shape = torch.Size((*local.shape[:-1], weight.shape[1]))
    stride = dense_strides_like(local, shape)
    tensor = DTensor.from_local(
        local, device_mesh, input_layouts, run_check=False, shape=shape, stride=stride
    )
    if input_layouts != desired_input_layouts:
        tensor = tensor.redistribute(placements=desired_input_layouts, async_op=True)
    return tensor


def _install_styles(style: Any) -> Callable[[], None]:
    theirs = style.RowwiseParallel._prepare_input_fn
    if user_patches.bypassed_by_replacement(theirs):
        return lambda: None
    return patching.replace(theirs, _prepare_rowwise_input)


_loss_hook = InstallOnImport(_LOSS, _install_loss)
_styles_hook = InstallOnImport(_STYLES, _install_styles)


def install() -> Callable[[], None]:
    return patching.install_all((_loss_hook.install, _styles_hook.install))
