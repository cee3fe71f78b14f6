"""Every form in which a caller names a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from differential import world_group
from ranks import device_type, made_once
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def all_ranks() -> list[int]:
    return list(range(dist.get_world_size()))


@made_once
def line() -> DeviceMesh:
    return init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("line",))


@made_once
def square() -> DeviceMesh:
    """Ranks [[0, 1], [2, 3]]."""
    return init_device_mesh(device_type(), (2, 2), mesh_dim_names=("row", "column"))


@made_once
def own_column() -> dist.ProcessGroup:
    """Returns the group [0, 2] or [1, 3]. PyTorch finds no group of a mesh by its ranks."""
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return columns[dist.get_rank() % 2]


# The caller's argument, and the group that it means.
FORMS: dict[str, Callable[[], tuple[Any, dist.ProcessGroup]]] = {
    "group": lambda: (world_group(), world_group()),
    "name": lambda: (world_group().group_name, world_group()),
    "none": lambda: (None, world_group()),
    "mesh": lambda: (line(), world_group()),
    "mesh and its name": lambda: ((line(), "line"), world_group()),
    "ranks": lambda: (all_ranks(), world_group()),
    "lists of ranks": lambda: ([all_ranks()], world_group()),
    "group of a mesh dim": lambda: (square().get_group(0), square().get_group(0)),
    "mesh and dim 0": lambda: ((square(), 0), square().get_group(0)),
    "mesh and dim 1": lambda: ((square(), 1), square().get_group(1)),
    "mesh and name": lambda: ((square(), "column"), square().get_group(1)),
    "mesh and dim -1": lambda: ((square(), -1), square().get_group(1)),
    "sub-mesh": lambda: (square()["column"], square().get_group(1)),
    "columns of ranks": lambda: ([[0, 2], [1, 3]], own_column()),
}

FORMS_OF_ALL_RANKS = ["group", "name", "none", "mesh", "mesh and its name", "ranks", "lists of ranks"]

FORMS_OF_SOME_RANKS = [form for form in FORMS if form not in FORMS_OF_ALL_RANKS]
