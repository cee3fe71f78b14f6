"""Uneven shards between a ``ColwiseParallel`` and a ``RowwiseParallel`` layer.

``RowwiseParallel`` makes a DTensor of its input by ``DTensor.from_local``, which assumes that the shards of
all ranks are equally large. If the number of features does not divide, each rank then has another global
size, and the program ends in an error or hangs. The layer's weight has the true size.

PyTorch counterpart: ``torch.distributed.tensor.parallel.RowwiseParallel``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from ..collectives.import_hooks import PutOnImport
from ..redistribution.specs import dense_strides_like
from . import patching, user_patches


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


def _start(style: Any) -> Callable[[], None]:
    theirs = style.RowwiseParallel._prepare_input_fn
    if user_patches.passed_by(theirs):
        return lambda: None
    return patching.replaced(theirs, _prepare_rowwise_input)


put = PutOnImport("torch.distributed.tensor.parallel.style", _start).put
