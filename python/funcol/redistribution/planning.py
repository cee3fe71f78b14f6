"""Plans of redistributions: the steps that turn one layout of a tensor into another, on one mesh or two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

from .. import _C
from . import meshes as meshes  # which C++ calls
from .cost_models import AlphaBeta, CostModel, axis_names, listed_axes
from .texts import (
    MOST_ELEMENTS,
    MOST_RANK,
    MOST_RANKS,
    check_characters,
    mesh_sizes,
    number_of,
    quoted,
    short_placements,
)

Plan = _C.Plan
Step = _C.Step
MeshChange = _C.MeshChange

PlacementsLike: TypeAlias = Sequence[Any] | str
"""PyTorch's placements, one for each mesh axis, or text: ``"S0,R"``, ``"P(max), _S(0, 2)"``,
``"Shard(0), Replicate()"``."""

ShardOrderLike: TypeAlias = Sequence[Any] | str | None
"""PyTorch's tuple of ``ShardOrderEntry(tensor_dim, mesh_dims)``, or text: ``"0:tp,dp; 1:cp"``, first cut
first.

``None``: axes cut a dim in the order of the mesh.
"""

MeshLike: TypeAlias = DeviceMesh | Mapping[str, int] | str
"""A ``DeviceMesh``; or ``{"dp": 2, "tp": 4}``, ``"dp=2,tp=4"`` or ``"2,4"``, which need no process group."""

CostModels: TypeAlias = CostModel | tuple[CostModel, CostModel]
"""One that has the axes of both meshes, or one for each."""

_MOST_AXES = 32
_MOST_DIMS = 2**31 - 1


def plan_redistribution(
    src: PlacementsLike,
    dst: PlacementsLike,
    mesh: MeshLike,
    shape: Sequence[int],
    dtype: torch.dtype | str = torch.float32,
    *,
    src_shard_order: ShardOrderLike = None,
    dst_shard_order: ShardOrderLike = None,
    cost_model: CostModel | None = None,
    max_bytes: int | None = None,
) -> Plan:
    """Returns the steps of least cost that turn ``src`` into ``dst`` for a tensor of full shape ``shape``.

    If the search takes 128 states, as it may for four or more mesh axes, the cost may be up to 1.25 times the
    least.

    Planning runs nothing and involves no other rank: the same arguments give the same plan everywhere.
    ``cost_model`` is :class:`~funcol.redistribution.AlphaBeta` or :class:`~funcol.redistribution.StepCounts`;
    the default is PyTorch's own estimates for one host, in microseconds. ``max_bytes`` bounds the memory that
    a rank holds at any time, the source included. Collectives over several axes at once are used where the
    ``DeviceMesh`` has a group for them (flattened submeshes, the world); a mesh given by sizes is assumed to
    have one for all of its axes together.

    Raises ``ValueError`` if the arguments contradict each other, or if no plan keeps within ``max_bytes``.
    PyTorch counterpart: ``DTensorRedistributePlanner``, which does not know sizes.
    """
    # C++ reads device meshes and has the default model: Python objects for them cost as much as the search.
    known_mesh = mesh if isinstance(mesh, DeviceMesh) else mesh_of(mesh)
    src, dst = read_placements(src), read_placements(dst)
    tensor = read_tensor("plan_redistribution", shape, dtype)
    orders = shard_order(src_shard_order, mesh), shard_order(dst_shard_order, mesh)
    model = None if cost_model is None else model_for(cost_model, mesh_of(mesh))
    return _C.plan_redistribution(src, dst, known_mesh, *tensor, *orders, model, max_bytes)


def greedy_redistribution(
    src: PlacementsLike,
    dst: PlacementsLike,
    mesh: MeshLike,
    shape: Sequence[int],
    dtype: torch.dtype | str = torch.float32,
    *,
    src_shard_order: ShardOrderLike = None,
    dst_shard_order: ShardOrderLike = None,
    cost_model: CostModel | None = None,
) -> Plan:
    """Returns the plan of PyTorch's greedy planner, axis by axis, priced by ``cost_model``, for comparison.

    Arguments are those of :func:`funcol.plan_redistribution`. Raises ``ValueError`` for shard orders other
    than the default one. PyTorch counterpart: ``DTensorRedistributePlanner.generate_greedy_transform_infos``.
    """
    known_mesh = mesh_of(mesh)
    src, dst = read_placements(src), read_placements(dst)
    tensor = read_tensor("greedy_redistribution", shape, dtype)
    orders = shard_order(src_shard_order, mesh), shard_order(dst_shard_order, mesh)
    model = model_for(cost_model, known_mesh)
    return _C.greedy_redistribution(src, dst, known_mesh, *tensor, *orders, model)


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
    """Returns the least-cost plan that moves a tensor of full shape ``shape`` from ``src`` on ``mesh`` to
    ``dst`` on ``to_mesh``.

    Planning runs nothing and involves no other rank. ``ranks`` and ``to_ranks`` are the ranks of the meshes
    in the world, the last axis first, below 2^24 (default: those of a ``DeviceMesh``, else 0, 1, ...). The
    plan reduces partial values on ``mesh``, then sends each element once to each rank that lacks it. Replicas
    share this equally: no other choice of senders has a busiest one that sends less. Where it costs less, the
    plan gathers on ``to_mesh`` what few ranks would have to send to many, and on meshes of the same ranks it
    is one redistribution. Other arguments are those of :func:`funcol.plan_redistribution`; a cost model has
    costs for the axes of both meshes, or a pair has one for each mesh.

    A ``MeshChange`` has the parts (``before``, ``transfer``, ``after``), ``cost``, ``peak_bytes``; ``ranks``,
    those of both meshes; ``bytes``, which each of these sends to each; and ``bound``, the fewest bytes that
    the busiest rank sends in any plan. Raises ``ValueError`` if the arguments contradict each other, or if no
    plan keeps within ``max_bytes``.
    """
    src, dst = read_placements(src), read_placements(dst)
    sizes, itemsize = read_tensor("plan_mesh_change", shape, dtype)
    models = models_for(cost_model, mesh_of(mesh), mesh_of(to_mesh))
    return _C.plan_mesh_change(
        src,
        dst,
        _with_ranks(mesh, ranks),
        _with_ranks(to_mesh, to_ranks),
        sizes,
        itemsize,
        shard_order(src_shard_order, mesh),
        shard_order(dst_shard_order, to_mesh),
        models,
        max_bytes,
    )


def mesh_of(mesh: MeshLike) -> _C.Mesh:
    """Returns the sizes and names of the axes of ``mesh``, and the sets of axes that share a group."""
    if isinstance(mesh, DeviceMesh):
        return _C.mesh_of(mesh)
    sizes = mesh_sizes(mesh) if isinstance(mesh, str) else mesh
    if not isinstance(sizes, Mapping):
        raise TypeError(
            f"funcol: got a {type(mesh).__name__} where a mesh belongs. Pass a DeviceMesh, a dict such as "
            '{"dp": 2, "tp": 4}, or text such as "dp=2,tp=4".'
        )
    for name, size in sizes.items():
        if not isinstance(name, str) or not isinstance(size, int) or size < 1:
            raise ValueError(
                f"funcol: mesh axis {name!r} has size {size!r}, expected a name and 1 or more ranks."
            )
        check_characters("the mesh axis", name)
    if len(sizes) > _MOST_AXES:
        raise ValueError(f"funcol: a mesh of {len(sizes)} axes, expected at most {_MOST_AXES}.")
    if math.prod(sizes.values()) > MOST_RANKS:
        raise ValueError(f"funcol: the mesh {listed_axes(sizes)} has more than {MOST_RANKS} ranks.")
    merged = [axis for axis, size in enumerate(sizes.values()) if size > 1]
    together = [sum(1 << axis for axis in merged)] if len(merged) > 1 else []
    return _C.Mesh(list(sizes.values()), list(sizes), together)


def read_placements(placements: PlacementsLike) -> PlacementsLike:
    """Returns ``placements`` as C++ reads them. Raises ValueError for text that UTF-8 cannot encode."""
    if not isinstance(placements, str):
        return placements
    check_characters("the placements", placements)
    return short_placements(placements)


def model_for(cost_model: CostModel | None, mesh: _C.Mesh) -> _C.AlphaBeta | _C.StepCounts:
    """Returns ``cost_model`` with its axes in the order of those of ``mesh``."""
    if cost_model is None:
        return _C.default_alpha_beta(mesh)
    if isinstance(cost_model, AlphaBeta):
        return cost_model.for_mesh(mesh)
    if isinstance(cost_model, _C.StepCounts):
        return cost_model
    raise TypeError(
        f"funcol: the cost model is a {type(cost_model).__name__}, expected AlphaBeta, StepCounts or None."
    )


def models_for(cost_model: CostModels | None, *meshes: _C.Mesh) -> tuple[Any, Any] | None:
    """Returns the models of two meshes, each with the axes of its mesh."""
    if cost_model is None:
        return None
    given = cost_model if isinstance(cost_model, tuple) else (cost_model, cost_model)
    src, dst = (model_for(_restrict(model, mesh), mesh) for model, mesh in zip(given, meshes, strict=True))
    return src, dst


def _restrict(model: CostModel, mesh: _C.Mesh) -> CostModel:
    if not isinstance(model, AlphaBeta):
        return model
    names = axis_names(mesh)
    return AlphaBeta({name: axis for name, axis in model.axes.items() if name in names}, model.copy)


def shard_order(order: ShardOrderLike, mesh: MeshLike) -> Sequence[Any] | None:
    """Returns ``order`` as PyTorch writes it: ``"0:tp,dp"`` on (dp, tp) is ``((0, (1, 0)),)``."""
    if not isinstance(order, str):
        return order
    names = axis_names(mesh_of(mesh))
    entries = []
    for entry in filter(None, map(str.strip, order.split(";"))):
        dim, colon, axes = entry.partition(":")
        number = number_of(dim.strip(), _MOST_DIMS)
        if not colon or number is None:
            raise ValueError(
                f"funcol: '{quoted(entry)}' is not a shard order. Write a tensor dim and the mesh axes that "
                'cut it, first cut first: "0:tp,dp". Put ";" between dims.'
            )
        cuts = [axis.strip() for axis in axes.split(",")]
        for axis in cuts:
            if axis not in names:
                raise ValueError(
                    f"funcol: the shard order '{quoted(entry)}' names the mesh axis '{quoted(axis)}'. "
                    f"There are {', '.join(names)}."
                )
        entries.append((number, tuple(map(names.index, cuts))))
    return tuple(entries)


def dtype_of(name: str) -> torch.dtype:
    """Returns PyTorch's dtype of a name: ``"bfloat16"`` or ``"torch.bfloat16"``."""
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"funcol: '{quoted(name)}' is not a dtype. Write it as PyTorch does: float32, bfloat16, int64."
        )
    return dtype


def read_tensor(op: str, shape: Sequence[int], dtype: torch.dtype | str) -> tuple[list[int], int]:
    """Returns the sizes of a tensor, and the bytes of an element, both checked."""
    sizes = list(shape)
    for size in sizes:
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"{op}: the shape is {tuple(sizes)}, expected sizes of 0 or more.")
    if math.prod(max(size, 1) for size in sizes) > MOST_ELEMENTS:
        raise ValueError(f"{op}: the shape is {tuple(sizes)}, expected 2^48 elements at most.")
    known = dtype_of(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(known, torch.dtype):
        raise TypeError(f"{op}: the dtype is a {type(dtype).__name__}, expected a torch.dtype or its name.")
    return sizes, known.itemsize


def _with_ranks(mesh: MeshLike, ranks: Sequence[int] | None) -> tuple[_C.Mesh | DeviceMesh, list[int] | None]:
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
