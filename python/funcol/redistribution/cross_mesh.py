"""Redistribution from one ``DeviceMesh`` to another: of the same ranks, of some of them, or of others."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _MaskPartial

from .. import _C
from ..collectives.groups import group_by_name, mesh_group_name
from . import callbacks as callbacks  # which C++ calls
from .agreement import Agreement, Manifest, mesh_value
from .local_redistribute import (
    Redistribute,
    RedistributionOptions,
    axes_with_own_rules,
    redistribute_with_autograd,
)
from .meshes import merged_groups
from .planning import CostModels, mesh_of, models_for
from .specs import has_symbols, meta_of, target_spec, without_partials

Order = tuple[tuple[int, tuple[int, ...]], ...] | None


@dataclasses.dataclass(frozen=True)
class CrossMeshOptions(RedistributionOptions):
    """The options of a redistribution between meshes; ``model`` has the models of both, source first."""

    def move(
        self,
        locals_: list[Tensor],
        srcs: Sequence[DTensorSpec],
        dsts: Sequence[DTensorSpec],
        is_explicit: bool,
    ) -> list[Tensor]:
        moved: list[Tensor] = _C.redistribute_local_tensors(
            locals_, list(srcs), list(dsts), self.async_op, self.model, self.max_bytes, is_explicit
        )
        return moved

    def back(self, src: DTensorSpec, dst: DTensorSpec) -> CrossMeshOptions:
        _check_leads_back(src.mesh, dst.mesh)
        return dataclasses.replace(self, model=None if self.model is None else self.model[::-1])

    def target_of_gradient(
        self, gradient: DTensor, src: DTensorSpec, dtype: torch.dtype
    ) -> tuple[DTensor, DTensorSpec]:
        """Reduces what C++ cannot move. Returns a spec that is replicated where ``src`` is partial."""
        meta = TensorMeta(gradient.shape, gradient.stride(), dtype)
        dst = dataclasses.replace(src, placements=without_partials(src.placements), tensor_meta=meta)
        return _reduce_special(gradient), dst


def is_other_mesh(mesh: DeviceMesh, other: DeviceMesh | None) -> bool:
    """Returns true if ``other`` is a mesh other than ``mesh``."""
    return other is not None and other is not mesh and other != mesh


def redistribute_between(
    dtensors: Sequence[DTensor],
    mesh: DeviceMesh,
    targets: Sequence[tuple[Placement, ...]],
    order: Order = None,
    *,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    async_op: bool = False,
    cost_model: CostModels | None = None,
    max_bytes: int | None = None,
    agrees: bool = False,
) -> list[DTensor]:
    """Redistributes ``dtensors``, all on one other mesh, to ``targets`` on ``mesh``. With ``agrees``, first
    waits until the ranks of both meshes are about to make the same move."""
    _check(dtensors)
    src_mesh = dtensors[0].device_mesh
    if agrees:
        given = {"async_op": async_op, "cost_model": repr(cost_model), "max_bytes": max_bytes}
        _agree(dtensors, mesh, targets, given)
    if src_mesh.device_type != mesh.device_type:
        raise ValueError(
            f"funcol::redistribute: from {src_mesh} on {src_mesh.device_type} to {mesh} on "
            f"{mesh.device_type}. Both meshes have to be of one kind of device: move the local tensors first."
        )
    models = None
    if cost_model is not None:
        models = models_for(cost_model, mesh_of(src_mesh), mesh_of(mesh))
    options = CrossMeshOptions(async_op, models, max_bytes)
    records = torch.is_grad_enabled() and any(dtensor.requires_grad for dtensor in dtensors)
    if not records and forward_dtype is None:
        try:
            moved = _C.redistribute_many(
                list(dtensors), mesh, list(targets), order, async_op, models, max_bytes
            )
        except NotImplementedError:
            if not any(map(_need_steps, dtensors, targets)):
                raise
            moved = NotImplemented
        if moved is not NotImplemented:
            return moved  # type: ignore[no-any-return]
    prepared = [_reduce_special(dtensor) for dtensor in dtensors]
    dsts = tuple(
        target_spec(dtensor._spec, mesh, _without_own_rules(target), order, forward_dtype)
        for dtensor, target in zip(prepared, targets, strict=True)
    )
    dtypes = ((dtype,) * len(prepared) for dtype in (forward_dtype, backward_dtype))
    moved = Redistribute.apply(dsts, options, *dtypes, True, *prepared)
    return [*map(_redistribute_special, moved, targets)]


def _agree(
    dtensors: Sequence[DTensor],
    mesh: DeviceMesh,
    targets: Sequence[tuple[Placement, ...]],
    options: dict[str, Any],
) -> None:
    """Waits until the ranks of ``mesh`` and of the mesh of ``dtensors`` are about to make the same move.
    Raises ValueError on all of them if their moves differ. A rank of neither mesh does not take part."""
    src, dst = mesh_value(dtensors[0].device_mesh), mesh_value(mesh)
    ranks = {*src.ranks, *dst.ranks}
    if not dist.is_initialized() or dist.get_rank() not in ranks:
        return
    manifest = Manifest({"device_mesh": str(tuple(dst)), **options})
    manifest.add_mesh(mesh)
    for index, (dtensor, target) in enumerate(zip(dtensors, targets, strict=True)):
        manifest.add(f"tensor {index}", dtensor, target=target)
    Agreement("redistribute_many", None, [*ranks]).meet(manifest)


def _check(dtensors: Sequence[DTensor]) -> None:
    if torch.compiler.is_compiling() or _C.has_active_layers():
        raise NotImplementedError(
            "funcol::redistribute: to another mesh only eagerly. Call it outside of compiled regions, "
            "tracers and dispatch modes."
        )
    for dtensor in dtensors:
        if has_symbols(meta_of(dtensor._spec)):
            raise NotImplementedError(
                f"funcol::redistribute: a tensor of shape {tuple(dtensor.shape)} has symbols as sizes. Only "
                "tensors of known sizes go to another mesh."
            )


def _is_special(placement: Placement) -> bool:
    return isinstance(placement, _MaskPartial) or bool(axes_with_own_rules([placement]))


def _need_steps(dtensor: DTensor, target: Sequence[Placement]) -> bool:
    return any(map(_is_special, (*dtensor.placements, *target)))


def _without_own_rules(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Replicate() if _is_special(one) else one for one in placements)


def _reduce_special(dtensor: DTensor) -> DTensor:
    """Reduces masks, and partials that have rules of their own, in ``dtensor``."""
    return _redistribute_special(dtensor, _without_own_rules(dtensor.placements))


def _redistribute_special(dtensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """Redistributes ``dtensor`` to ``placements`` if either has masks or partials with rules of their own."""
    if not _need_steps(dtensor, placements):
        return dtensor
    dst = target_spec(dtensor._spec, dtensor.device_mesh, placements)
    return redistribute_with_autograd(dtensor, dst, RedistributionOptions())


def _check_leads_back(src: DeviceMesh, dst: DeviceMesh) -> None:
    missing = sorted({*mesh_value(src).ranks} - {*mesh_value(dst).ranks})
    if missing:
        raise ValueError(
            f"funcol::redistribute: the gradient of a tensor that went from {src} to {dst} is asked for, but "
            f"ranks {missing} of the first mesh are not in the second one, and take no part in its backward "
            "pass. Detach the tensor before it goes, or go to a mesh that has these ranks, too."
        )


def mesh_pair(src: DeviceMesh, dst: DeviceMesh) -> tuple[list[int], list[int], int, str | None, list[int]]:
    """Returns the ranks of both meshes, this rank, and name and ranks of the smallest group with all of them.

    The group is None on a rank of neither mesh. All ranks of both meshes find the same group: it is a group
    of one of the meshes or of a mesh that one of them was sliced from, or the world.
    """
    ranks = [*mesh_value(src).ranks], [*mesh_value(dst).ranks]
    everybody = {*ranks[0], *ranks[1]}
    own = dist.get_rank()
    if own not in everybody:
        return *ranks, own, None, []
    groups = {name: members for name, members in _groups(src, dst) if everybody <= set(members)}
    if not groups:
        raise ValueError(
            f"funcol::redistribute: no process group that serves {src.device_type} has the ranks of {src} "
            f"and of {dst}. Make one of them a part of a mesh of all ranks, or initialize the default group "
            "with a backend for these devices."
        )
    name = min(groups, key=lambda name: (len(groups[name]), name))
    return *ranks, own, name, groups[name]


def _groups(src: DeviceMesh, dst: DeviceMesh) -> Iterator[tuple[str, list[int]]]:
    """Yields the names and ranks of this rank's groups that the meshes know, and of the world."""
    world = dist.group.WORLD
    if world is not None and torch.device(src.device_type) in world._device_types:
        yield world.group_name, list(range(dist.get_world_size()))
    for mesh in (src, dst, src._get_root_mesh(), dst._get_root_mesh()):
        if mesh.get_coordinate() is None:
            continue
        names = [mesh_group_name(mesh, axis) for axis in range(mesh.ndim)]
        for name in (*names, *merged_groups(mesh).values()):
            yield name, dist.get_process_group_ranks(group_by_name(name))


_C.register_callback("mesh_pair", mesh_pair)
