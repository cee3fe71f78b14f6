"""Plans of redistributions from one mesh to another, as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import _C
from .cost_models import AlphaBeta, CostModel, axis_names
from .planning import (
    MeshLike,
    PlacementsLike,
    ShardOrderLike,
    mesh_of,
    model_for,
    read_placements,
    read_tensor,
    shard_order,
)
from .texts import MOST_RANK

MeshChange = _C.MeshChange

CostModels: TypeAlias = CostModel | tuple[CostModel, CostModel]
"""One that has the axes of both meshes, or one for each."""


def plan_mesh_change(
    src: PlacementsLike,
    dst: PlacementsLike,
    mesh: MeshLike,
    to_mesh: MeshLike,
    shape: Sequence[int],
    dtype: torch.dtype | str = torch.float32,
    *,
    ranks: Sequence[int] | None = None,
    to_ranks: Sequence[int] | None = None,
    src_shard_order: ShardOrderLike = None,
    dst_shard_order: ShardOrderLike = None,
    cost_model: CostModels | None = None,
    max_bytes: int | None = None,
) -> MeshChange:
    """The least-cost plan that moves a tensor, ``shape`` as a whole, from ``src`` on ``mesh`` to ``dst`` on
    ``to_mesh``.

    Runs nothing and asks no other rank. ``ranks`` and ``to_ranks`` are the ranks of the meshes in the world,
    the last axis first, below 2^24 (default: those of a ``DeviceMesh``, else 0, 1, ...). The plan reduces
    partial values on ``mesh``, then sends each element once to each rank that lacks it. Replicas share this
    equally: no other choice of senders has a busiest one that sends less. Where that costs less, the plan
    gathers on ``to_mesh`` what few ranks would have to send to many, and on meshes of the same ranks it is
    one redistribution. Other arguments are those of :func:`funcol.plan_redistribution`; a cost model has
    costs for the axes of both meshes, or there is one for each.

    A ``MeshChange`` has the parts (``before``, ``transfer``, ``after``), ``cost``, ``peak_bytes``; ``ranks``,
    all of them; ``bytes``, what each of these sends to each; and ``bound``, the least that the busiest sends
    in any plan. ``ValueError`` if the arguments contradict each other, or if no plan keeps within
    ``max_bytes``.
    """
    src, dst = read_placements(src), read_placements(dst)
    sizes, itemsize = read_tensor("plan_mesh_change", shape, dtype)
    models = models_for(cost_model, mesh_of(mesh), mesh_of(to_mesh))
    return _C.plan_mesh_change(
        src,
        dst,
        _ranked(mesh, ranks),
        _ranked(to_mesh, to_ranks),
        sizes,
        itemsize,
        shard_order(src_shard_order, mesh),
        shard_order(dst_shard_order, to_mesh),
        models,
        max_bytes,
    )


def models_for(cost_model: CostModels | None, *meshes: _C.Mesh) -> tuple[Any, Any] | None:
    """The models of two meshes, of which each has the axes of its mesh."""
    if cost_model is None:
        return None
    given = cost_model if isinstance(cost_model, tuple) else (cost_model, cost_model)
    src, dst = (model_for(_part(model, mesh), mesh) for model, mesh in zip(given, meshes, strict=True))
    return src, dst


def _part(model: CostModel, mesh: _C.Mesh) -> CostModel:
    if not isinstance(model, AlphaBeta):
        return model
    names = axis_names(mesh)
    return AlphaBeta({name: axis for name, axis in model.axes.items() if name in names}, model.copy)


def _ranked(mesh: MeshLike, ranks: Sequence[int] | None) -> tuple[_C.Mesh | DeviceMesh, list[int] | None]:
    if isinstance(mesh, DeviceMesh) and ranks is None:
        return mesh, None
    known = mesh_of(mesh)
    if ranks is None:
        return known, list(range(_checked_rank(math.prod(known.sizes) - 1) + 1))
    return known, [_checked_rank(rank) for rank in ranks]


def _checked_rank(rank: int) -> int:
    if not isinstance(rank, int) or not 0 <= rank <= MOST_RANK:
        raise ValueError(f"plan_mesh_change: got rank {rank!r}, expected numbers from 0 to {MOST_RANK}.")
    return rank
