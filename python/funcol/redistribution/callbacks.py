"""Functions that C++ calls while it redistributes: for specs, groups of axes, masks, and ``DebugMode``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.utils._debug_mode import get_active_debug_mode
from torch.utils._python_dispatch import _disable_current_modes

from .. import _C, _compat
from ..collectives.groups import group_by_name, mesh_group_name
from .meshes import merged_groups


def axis_group(mesh: DeviceMesh, axes: int) -> tuple[str, list[int]]:
    """Returns the name of the group along a set of ``axes``, a bit for each, and the places of its ranks.

    Places count up along the last axis first. The list is empty if the ranks of the group are in that order.
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
    try:
        members = _members(group_by_name(name))
    except (RuntimeError, ValueError):  # the group is gone, as uses of its name report
        return name, []
    return name, [] if members == ranks else [ranks.index(member) for member in members]


def ranks_of_mesh(mesh: DeviceMesh) -> tuple[str, list[int]]:
    """Returns the name of the default group, and the ranks of ``mesh`` in it, which count up along the last
    axis first."""
    with _disable_current_modes():
        return dist.group.WORLD.group_name, mesh.mesh.flatten().tolist()  # type: ignore[union-attr]


def _members(group: dist.ProcessGroup) -> list[int]:
    """Returns the ranks in the world of the group's ranks. Once the world is reconfigured, its ranks are
    numbered anew, which PyTorch's list does not follow."""
    if group is dist.group.WORLD:
        return list(range(group.size()))
    return dist.get_process_group_ranks(group)


def note_redistribution(
    local: Tensor,
    src: tuple[Placement, ...],
    dst: tuple[Placement, ...],
    trace: str,
    is_explicit: bool,
) -> contextlib.AbstractContextManager[object]:
    """Returns the context in which PyTorch's ``DebugMode`` records the operators of a redistribution."""
    mode = get_active_debug_mode()
    if mode is None:
        return contextlib.nullcontext()
    return mode.record_redistribute_calls(local, src, dst, trace, is_explicit=is_explicit)


def apply_mask(placement: Any, tensor: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """Returns a copy of ``tensor`` with zeros in rows of other ranks, as a masked partial reduces it.
    Releases the mask."""
    masked = tensor.clone()
    placement.mask_buffer.apply_mask(masked)
    placement.mask_buffer.release_mask()
    return masked


def fill_mask(placement: Any, tensor: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """Returns the indices of ``tensor`` within this rank's rows. Keeps the mask of the other rows in
    ``placement``, for :func:`apply_mask`."""
    result: Tensor = placement._partition_value(tensor, mesh, axis)
    return result


_C.register_callback("axis_group", axis_group)
_C.register_callback("ranks_of_mesh", ranks_of_mesh)
_C.register_callback("note_redistribution", note_redistribution)
_C.register_callback("apply_mask", apply_mask)
_C.register_callback("fill_mask", fill_mask)
_C.register_callback("make_spec", _compat.make_spec)
