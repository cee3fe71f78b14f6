"""Redistribution of sharded tensors: from one layout on a ``DeviceMesh`` to another.

The steps are those of a least-cost plan (:func:`funcol.plan_redistribution`), which is remembered by value. Sizes
need not divide, shards may be strided, and axes may cut a dim in any order; the shards are exact in every case.

PyTorch counterpart: ``torch.distributed.tensor._redistribute``.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import _disable_current_modes

from . import _C, _compat


def redistribute_local_tensor(
    local: Tensor,
    src_spec: DTensorSpec,
    dst_spec: DTensorSpec,
    *,
    async_op: bool = False,
    cost_model: Any = None,
    max_bytes: int | None = None,
) -> Tensor:
    """This rank's tensor under ``dst_spec``, from the one it holds under ``src_spec``.

    All ranks of the mesh call it alike. Returns a contiguous tensor that shares no memory with ``local``, or
    ``local`` itself if there is nothing to do, or if the rank is not part of the mesh. With ``async_op`` the result may
    be pending and waits at its first use.

    ``cost_model`` says what is cheap (default: latency and bandwidth of one host); ``max_bytes`` bounds the memory of
    every step. ``ValueError``, before anything is sent, if ``local`` has not the shape that ``src_spec`` gives this
    rank, if a spec contradicts itself, or if no plan stays within ``max_bytes``; ``NotImplementedError`` for two
    different meshes and for placements of unknown kinds.

    PyTorch counterpart: ``torch.distributed.tensor._redistribute.redistribute_local_tensor``.
    """
    result: Tensor = _C.redistribute_local_tensor(
        local, src_spec, dst_spec, async_op, cost_model, max_bytes
    )
    return result


def _axis_group(mesh: DeviceMesh, axes: int) -> tuple[str, list[int]]:
    """Name of the group along a set of ``axes``, a bit an axis, and the place of each of its ranks.

    Places count up along the last axis first; an empty list if the group's ranks do so themselves.
    """
    listed = [axis for axis in range(mesh.ndim) if axes >> axis & 1]
    if len(listed) != 1:
        return _compat.merged_groups(mesh)[axes], []
    name = _compat.mesh_group_name(mesh, listed[0])
    with _disable_current_modes():
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        along_axis = mesh.mesh
        for axis in reversed(range(mesh.ndim)):
            if axis != listed[0]:
                along_axis = along_axis.select(axis, coordinate[axis])
        ranks = along_axis.tolist()
    members = dist.get_process_group_ranks(_compat.group_named(name))
    return name, [] if members == ranks else [ranks.index(member) for member in members]


def _apply_mask(placement: Any, tensor: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """What a masked partial reduces: ``tensor`` with zeros where another rank has the row. Ends the mask's use."""
    masked = tensor.clone()
    placement.mask_buffer.apply_mask(masked)
    placement.mask_buffer.release_mask()
    return masked


def _mask(placement: Any, tensor: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """The indices of ``tensor`` within this rank's rows; keeps the mask of the others for :func:`_apply_mask`."""
    result: Tensor = placement._partition_value(tensor, mesh, axis)
    return result
