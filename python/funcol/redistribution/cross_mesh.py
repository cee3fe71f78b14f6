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
from torch.utils._python_dispatch import _disable_current_modes

from .. import _C
from ..collectives.groups import group_named, mesh_group_name
from . import callbacks as callbacks  # which C++ calls
from .agreement import Agreement, Manifest, mesh_value
from .gradients import Redistribute
from .local_redistribute import How, axes_with_own_rules, make_dtensor
from .mesh_changes import CostModels, models_for
from .meshes import merged_groups
from .planning import mesh_of
from .specs import has_symbols, meta_of, target_spec, without_partials

Order = tuple[tuple[int, tuple[int, ...]], ...] | None


@dataclasses.dataclass(frozen=True)
class Way:
    """The options of a redistribution between meshes."""

    async_op: bool = False
    models: tuple[Any, Any] | None = None  # of the meshes in the order of the call; None: the default ones
    max_bytes: int | None = None

    def back(self) -> Way:
        return dataclasses.replace(self, models=None if self.models is None else self.models[::-1])


def are_different(mesh: DeviceMesh, other: DeviceMesh | None) -> bool:
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
    """``dtensors``, all on one other mesh, with placements of ``targets`` on ``mesh``. With ``agrees``, once
    the ranks of both meshes are about to make one move."""
    _check(dtensors)
    src_mesh = dtensors[0].device_mesh
    if agrees:
        options = {"async_op": async_op, "cost_model": repr(cost_model), "max_bytes": max_bytes}
        _agree(dtensors, mesh, targets, options)
    if src_mesh.device_type != mesh.device_type:
        raise ValueError(
            f"funcol::redistribute: from {src_mesh} on {src_mesh.device_type} to {mesh} on "
            f"{mesh.device_type}. Both meshes have to be of one kind of device: move the local tensors first."
        )
    models = None
    if cost_model is not None:
        models = models_for(cost_model, mesh_of(src_mesh), mesh_of(mesh))
    way = Way(async_op, models, max_bytes)
    records = torch.is_grad_enabled() and any(dtensor.requires_grad for dtensor in dtensors)
    if not records and forward_dtype is None:
        try:
            moved = _C.change_mesh(list(dtensors), mesh, list(targets), order, async_op, models, max_bytes)
        except NotImplementedError:
            if not any(
                _need_steps(dtensor, target) for dtensor, target in zip(dtensors, targets, strict=True)
            ):
                raise
            moved = None
        if moved is not None:
            return moved
    prepared = [_with_known_partials(dtensor) for dtensor in dtensors]
    known = [tuple(map(_without_own_rules, target)) for target in targets]
    dsts = tuple(
        target_spec(dtensor._spec, mesh, target, order, forward_dtype)
        for dtensor, target in zip(prepared, known, strict=True)
    )
    moved = ChangeMesh.apply(dsts, way, forward_dtype, backward_dtype, *prepared)
    return [_placed(*result) for result in zip(moved, targets, strict=True)]


def _agree(
    dtensors: Sequence[DTensor],
    mesh: DeviceMesh,
    targets: Sequence[tuple[Placement, ...]],
    options: dict[str, Any],
) -> None:
    """Returns once the ranks of ``mesh`` and of the mesh of ``dtensors`` are about to make one move. Raises
    on all of them if they differ in it. A rank of neither mesh does not take part."""
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


def _without_own_rules(placement: Placement) -> Placement:
    return Replicate() if _is_special(placement) else placement


def _placed(dtensor: DTensor, placements: tuple[Placement, ...]) -> DTensor:
    """``dtensor`` with the partials of ``placements`` that have rules of their own, made on its mesh."""
    if not any(map(_is_special, placements)):
        return dtensor
    dst = target_spec(dtensor._spec, dtensor.device_mesh, placements, None, None)
    return Redistribute.apply(dtensor, dst, None, None, None, How(), True)  # type: ignore[no-any-return]


def _with_known_partials(dtensor: DTensor) -> DTensor:
    """``dtensor`` with masks and partials that have rules of their own reduced."""
    return _reduced(dtensor) if any(map(_is_special, dtensor.placements)) else dtensor


def _reduced(dtensor: DTensor) -> DTensor:
    placements = tuple(map(_without_own_rules, dtensor.placements))
    dst = target_spec(dtensor._spec, dtensor.device_mesh, placements, None, None)
    return Redistribute.apply(dtensor, dst, None, None, None, How(), True)  # type: ignore[no-any-return]


class ChangeMesh(torch.autograd.Function):
    """Each tensor under its spec of ``dsts``, sent as ``sent_dtype``, by default its own. It is its own
    gradient, so it is differentiable again."""

    @staticmethod
    def forward(
        ctx: Any,
        dsts: tuple[DTensorSpec, ...],
        way: Way,
        sent_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
        *dtensors: DTensor,
    ) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.srcs, ctx.dsts, ctx.way, ctx.backward_dtype = (
            [t._spec for t in dtensors],
            dsts,
            way,
            backward_dtype,
        )
        ctx.dtypes = [dtensor._local_tensor.dtype for dtensor in dtensors]
        held = [
            dtensor._local_tensor if sent_dtype is None else dtensor._local_tensor.to(sent_dtype)
            for dtensor in dtensors
        ]
        moved = _moved(held, ctx.srcs, dsts, way)
        results = tuple(
            make_dtensor(
                local if local.dtype == meta_of(dst).dtype else local.to(meta_of(dst).dtype), dst, False
            )
            for local, dst in zip(moved, dsts, strict=True)
        )
        ctx.mark_non_differentiable(
            *(result for result, needed in zip(results, ctx.needs_input_grad[4:], strict=True) if not needed)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> Any:
        results: list[DTensor | None] = [None] * len(grads)
        given = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        if given:
            _check_leads_back(ctx.srcs[0].mesh, ctx.dsts[0].mesh)
            dsts = tuple(_gradient_spec(grad, ctx.srcs[i], ctx.dtypes[i]) for i, grad in given)
            sent_dtype = ctx.backward_dtype
            moved = ChangeMesh.apply(
                dsts,
                ctx.way.back(),
                sent_dtype,
                sent_dtype,
                *(_with_known_partials(grad) for _, grad in given),
            )
            for (i, _), result in zip(given, moved, strict=True):
                results[i] = result
        return None, None, None, None, *results


def _moved(
    locals_: list[Tensor], srcs: Sequence[DTensorSpec], dsts: Sequence[DTensorSpec], way: Way
) -> list[Tensor]:
    moved = _C.change_mesh_of_locals(locals_, list(srcs), list(dsts), way.async_op, way.models, way.max_bytes)
    assert moved is not None
    return moved


def _gradient_spec(grad: DTensor, src: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The spec of the gradient of a tensor of ``src``: replicated where the tensor is partial."""
    meta = TensorMeta(grad.shape, grad.stride(), dtype)
    return dataclasses.replace(src, placements=without_partials(src.placements), tensor_meta=meta)


def _check_leads_back(src: DeviceMesh, dst: DeviceMesh) -> None:
    missing = sorted(set(ranks_of(src)) - set(ranks_of(dst)))
    if missing:
        raise ValueError(
            f"funcol::redistribute: the gradient of a tensor that went from {src} to {dst} is asked for, but "
            f"ranks {missing} of the first mesh are not in the second one, and take no part in its backward "
            "pass. Detach the tensor before it goes, or go to a mesh that has these ranks, too."
        )


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks of ``mesh``, the last axis first."""
    with _disable_current_modes():
        ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def mesh_pair(src: DeviceMesh, dst: DeviceMesh) -> tuple[list[int], list[int], int, str | None, list[int]]:
    """The ranks of both meshes, this rank, and the smallest group that has all of them, with its ranks.

    No group on a rank of neither mesh. All ranks of both meshes find the same group: it is a group of one of
    the meshes or of a mesh that one of them was sliced from, or the world.
    """
    ranks = ranks_of(src), ranks_of(dst)
    everybody = set(ranks[0]) | set(ranks[1])
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
    """The groups of this rank that the meshes know, and the world."""
    world = dist.group.WORLD
    if world is not None and torch.device(src.device_type) in world._device_types:
        yield world.group_name, list(range(dist.get_world_size()))
    for mesh in (src, dst, src._get_root_mesh(), dst._get_root_mesh()):
        if mesh.get_coordinate() is None:
            continue
        names = [mesh_group_name(mesh, axis) for axis in range(mesh.ndim)]
        for name in (*names, *merged_groups(mesh).values()):
            yield name, dist.get_process_group_ranks(group_named(name))


_C.hand_over("mesh_pair", mesh_pair)
