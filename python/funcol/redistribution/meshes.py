"""The axes of a ``DeviceMesh``, and the groups along several of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import combinations, pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from .. import _C


def mesh_axes(mesh: dist.device_mesh.DeviceMesh) -> tuple[list[int], list[str], list[int], int]:
    """Returns sizes and names of the axes of ``mesh``, the sets of axes that have a group, as a bit for each
    axis, and the number of devices of its type on a host."""
    names = list(mesh.mesh_dim_names or ())
    per_host = device_mesh._mesh_resources.num_devices_per_host(mesh.device_type)
    return list(mesh.shape), names, sorted(merged_groups(mesh)), per_host


def merged_groups(mesh: dist.device_mesh.DeviceMesh) -> dict[int, str]:
    """Returns names of groups along several axes of ``mesh``, by set: of flattened submeshes, of the world.

    A set has a bit for each of its axes, all with several ranks. Ranks count up along the last axis first.
    """
    layout: Any = mesh._layout
    offsets = [layout[axis].all_ranks_from_zero() for axis in range(mesh.ndim)]
    merged = [axis for axis in range(mesh.ndim) if len(offsets[axis]) > 1]
    if len(merged) < 2:
        return {}
    ranks = mesh._flatten_rank_map
    all_offsets = _row_major(offsets)
    if any(a >= b for a, b in pairwise(ranks)) or any(a >= b for a, b in pairwise(all_offsets)):
        return {}  # Groups count ranks in the order of the world, which is not that of the mesh.
    groups: dict[int, str] = {}
    if (
        dist.is_initialized()
        and len(all_offsets) == dist.get_world_size()
        and [ranks[offset] for offset in all_offsets] == list(range(dist.get_world_size()))
        and torch.device(mesh.device_type) in dist.group.WORLD._device_types  # type: ignore[union-attr]
    ):
        groups[sum(1 << axis for axis in merged)] = dist.group.WORLD.group_name  # type: ignore[union-attr]
    flattened = {
        tuple(submesh._layout[0].all_ranks_from_zero()): submesh._dim_group_names[0]
        for submesh in mesh._get_root_mesh()._flatten_mapping.values()
        if getattr(submesh, "_dim_group_names", None)
    }
    for count in range(2, len(merged) + 1) if flattened else ():
        for axes in combinations(merged, count):
            name = flattened.get(tuple(_row_major([offsets[axis] for axis in axes])))
            if name is not None:
                groups[sum(1 << axis for axis in axes)] = name
    return groups


def _row_major(offsets: Sequence[Sequence[int]]) -> list[int]:
    """Returns the offsets of ranks along several axes, the last axis first, from those along each axis."""
    return [sum(parts) for parts in product(*offsets)]


def simulates_ranks() -> bool:
    """Returns true if PyTorch's ``LocalTensorMode`` is active: one process simulates all ranks, and rank and
    sizes are symbols."""
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and module.local_tensor_mode() is not None


_C.register_callback("mesh_axes", mesh_axes)
