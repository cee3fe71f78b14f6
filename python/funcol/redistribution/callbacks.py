"""What C++ asks Python for while it redistributes: specs, groups of axes, masks, notes for ``DebugMode``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._debug_mode import get_active_debug_mode
from torch.utils._python_dispatch import _disable_current_modes

from .. import _C, _compat
from ..collectives.groups import group_named, mesh_group_name
from .meshes import merged_groups


def axis_group(mesh: DeviceMesh, axes: int) -> tuple[str, list[int]]:
    """Name of the group along a set of ``axes``, a bit an axis, and the place of each of its ranks.

    Places count up along the last axis first; an empty list if the group's ranks do so themselves.
    """
    listed = [axis for axis in range(mesh.ndim) if axes >> axis & 1]
    if len(listed) != 1:
        return merged_groups(mesh)[axes], []
    name = mesh_group_name(mesh, listed[0])
    with _disable_current_modes():
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        along_axis = mesh.mesh
        for axis in reversed(range(mesh.ndim)):
            if axis != listed[0]:
                along_axis = along_axis.select(axis, coordinate[axis])
        ranks = along_axis.tolist()
    members = dist.get_process_group_ranks(group_named(name))
    return name, [] if members == ranks else [ranks.index(member) for member in members]


def note_redistribution(
    local: Tensor,
    src: tuple[Placement, ...],
    dst: tuple[Placement, ...],
    trace: str,
    is_explicit: bool,
) -> contextlib.AbstractContextManager[object]:
    """Under PyTorch's ``DebugMode``, within which of its notes the operators of a redistribution are."""
    mode = get_active_debug_mode()
    if mode is None:
        return contextlib.nullcontext()
    note: contextlib.AbstractContextManager[object] = mode.record_redistribute_calls(
        local, src, dst, trace, is_explicit=is_explicit
    )
    return note


def apply_mask(placement: Any, tensor: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """What a masked partial reduces: ``tensor`` with zeros where another rank has the row. Ends the mask's
    use."""
    masked = tensor.clone()
    placement.mask_buffer.apply_mask(masked)
    placement.mask_buffer.release_mask()
    return masked


def fill_mask(placement: Any, tensor: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """The indices of ``tensor`` within this rank's rows; keeps the mask of the others for
    :func:`apply_mask`."""
    result: Tensor = placement._partition_value(tensor, mesh, axis)
    return result


def make_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    strided_as_order: bool | None,
) -> DTensorSpec:
    """A spec of its parts; ``order`` lists pairs of a dim and the axes that cut it."""
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    spec: DTensorSpec = _compat.make_spec(mesh, placements, meta, order, strided_as_order)
    return spec


_C.hand_over("axis_group", axis_group)
_C.hand_over("note_redistribution", note_redistribution)
_C.hand_over("apply_mask", apply_mask)
_C.hand_over("fill_mask", fill_mask)
_C.hand_over("make_spec", make_spec)
