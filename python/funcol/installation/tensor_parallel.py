"""Parts of ``torch.distributed.tensor.parallel`` that are wrong for some programs.

``log_softmax`` and ``nll_loss`` under ``loss_parallel``: PyTorch computes both gradients in the backward pass
of ``nll_loss``, and passes the gradient of ``log_softmax`` on as it is. So whatever else reads the
log-probabilities (label smoothing, an entropy, a KL divergence, a weighted sum) gets a wrong gradient,
silently, and so does an ``nll_loss`` without a ``log_softmax``. Here each operator computes its own gradient.
``log_softmax`` sums its gradient over the classes for that: one more all_reduce, of one value for each row.

Uneven shards between a ``ColwiseParallel`` and a ``RowwiseParallel`` layer: ``RowwiseParallel`` makes a
DTensor of its input by ``DTensor.from_local``, which assumes that the shards of all ranks are equally large.
If the number of features does not divide, each rank then has another global size, and the program ends in an
error or hangs. The layer's weight has the true size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .. import _C
from ..collectives.functions import all_reduce
from ..collectives.import_hooks import InstallOnImport
from ..redistribution.local_redistribute import make_dtensor
from ..redistribution.specs import dense_strides_like
from . import patching, user_patches

_LOSS = "torch.distributed.tensor.parallel.loss"
_STYLES = "torch.distributed.tensor.parallel.style"


def _log_softmax_backward(_op: OpOverload, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> DTensor:
    """Handles ``_log_softmax_backward_data(grad_output, output, dim, input_dtype)``."""
    grad, output, dim, input_dtype = args
    spec = output._spec
    dim %= output.ndim
    axis = sys.modules[_LOSS]._find_all_reduce_mesh_dim(spec.placements, dim)
    local = grad.redistribute(spec.mesh, spec.placements)._local_tensor
    if local.dtype in (torch.float16, torch.bfloat16):
        local = local.float()
    total = all_reduce(local.sum(dim, keepdim=True), "sum", (spec.mesh, axis))
    return _like(output, (local - torch.exp(output._local_tensor) * total).to(input_dtype))


def _nll_loss_backward(_op: OpOverload, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> DTensor:
    """Handles ``nll_loss_backward`` and ``nll_loss2d_backward``: ``(grad_output, self, target, weight,
    reduction, ignore_index, total_weight)``. The rank that holds a row's target class holds its gradient."""
    loss = sys.modules[_LOSS]
    grad, log_probs, target, weight, reduction, ignore_index, total_weight = args
    spec = log_probs._spec
    dim = 1 if log_probs.ndim > 1 else 0
    loss._find_all_reduce_mesh_dim(spec.placements, dim)  # raises if not one axis cuts the classes
    placements = loss._skip_dim(loss.replicate_reduction_dims(spec.placements, [dim]), dim)
    replicated = (Replicate(),) * spec.mesh.ndim
    target = loss._cast_to_dtensor(target, placements, spec.mesh)._local_tensor.unsqueeze(dim)
    grad = grad.redistribute(spec.mesh, placements if grad.ndim else replicated)._local_tensor
    if grad.ndim:
        grad = grad.unsqueeze(dim)
    if reduction == loss.Reduction.MEAN.value:
        grad = grad / total_weight
    is_counted = target != ignore_index
    if weight is not None:
        weight = loss._cast_to_dtensor(weight, replicated, spec.mesh)._local_tensor
        grad = grad * weight[torch.where(is_counted, target, 0)]

    local = log_probs._local_tensor
    _, offsets = compute_local_shape_and_global_offset(log_probs.shape, spec.mesh, spec.placements)
    column = target - offsets[dim]
    is_here = is_counted & (column >= 0) & (column < local.shape[dim])
    values = torch.where(is_here, -grad, 0).to(local.dtype)
    return _like(log_probs, torch.zeros_like(local).scatter_(dim, torch.where(is_here, column, 0), values))


def _like(of: DTensor, local: Tensor) -> DTensor:
    """Returns ``local`` as a DTensor with the mesh, placements and global shape of ``of``."""
    return make_dtensor(local, _C.copy_spec(of._spec), requires_grad=False)


def _install_loss(loss: Any) -> Callable[[], None]:
    ours = {
        torch.ops.aten._log_softmax_backward_data.default: _log_softmax_backward,
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
