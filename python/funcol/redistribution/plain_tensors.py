"""Redistribution of plain tensors, whose layouts the caller states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

from .cost_models import CostModel
from .local_redistribute import How, how_to_move
from .partition_specs import LayoutLike, MeshLayout, mesh_layout
from .specs import counted_from_0, dense_strides_like

_OP = "funcol::redistribute_tensor"


def redistribute_tensor(
    local: Tensor,
    mesh: DeviceMesh,
    src: LayoutLike,
    dst: LayoutLike,
    *,
    shape: Sequence[int],
    grad: LayoutLike | None = None,
    async_op: bool = False,
    cost_model: CostModel | None = None,
    max_bytes: int | None = None,
) -> Tensor:
    """This rank's part, under ``dst``, of the tensor of ``shape`` of which it holds ``local`` under ``src``.

    Layouts are placements, one for each axis of ``mesh``, or partition specs
    (:class:`funcol.redistribution.PartitionSpec`, or a plain tuple): for each dim the mesh axes that cut it,
    first cut first::

        rows = redistribute_tensor(x, mesh, (("dp", "tp"), None), ("dp", "tp"), shape=(1024, 512))

    Both say where values are partial, and on which axes they vary (:class:`funcol.redistribution.Varying`);
    ``shape`` is then that of the tensor on the other axes. All ranks of the mesh call it alike. The result is
    as that of :func:`funcol.redistribution.redistribute_local_tensor`: contiguous and in memory of its own,
    or ``local`` if nothing is to be done.

    Differentiable any number of times, by the rules of :func:`funcol.redistribute`: the gradient of the
    result has the layout ``grad``, by default ``dst`` with replicated for partial, and is redistributed to
    ``src``, replicated where ``src`` is partial and it is not. Pass ``grad`` where ranks use a replicated
    result for work of their own: ``grad=PartitionSpec(partial={"tp": "sum"})`` reduces their gradients.

    ``torch.compile`` and ``make_fx`` trace the collectives; symbolic sizes in ``shape`` stay symbols, except
    where ``dst`` makes partial values. The other arguments are constants of a compiled region.

    ``async_op``, ``cost_model``, ``max_bytes`` and the errors are those of
    :func:`funcol.redistribution.redistribute_local_tensor`. ``ValueError``, too, for a layout that names an
    axis twice or one that is not there, and if an axis varies in one layout only.

    PyTorch counterpart: ``DTensor.from_local(...).redistribute(...).to_local()``.
    """
    sizes = tuple(shape)
    layouts = [mesh_layout(_OP, layout, mesh, len(sizes)) for layout in (src, dst)]
    layouts.append(_gradient_layout(layouts[1]) if grad is None else mesh_layout(_OP, grad, mesh, len(sizes)))
    for layout in layouts[1:]:
        _check_varying(layouts[0], layout)
    kept = [axis for axis in range(mesh.ndim) if axis not in layouts[0].varying]
    if not kept:
        return local
    submesh = mesh if len(kept) == mesh.ndim else _submesh(mesh, kept)
    before, after, of_gradient = (_spec(submesh, layout, kept, sizes, local) for layout in layouts)
    how = how_to_move(submesh, async_op, cost_model, max_bytes)
    if not (torch.is_grad_enabled() and local.requires_grad):
        return how.run(local, before, after, is_explicit=True)
    return _Move.apply(local, before, after, of_gradient, how, True)  # type: ignore[no-any-return]


def _gradient_layout(layout: MeshLayout) -> MeshLayout:
    placements = (
        Replicate() if placement is not None and placement.is_partial() else placement
        for placement in layout.placements
    )
    return MeshLayout(tuple(placements), layout.order)


def _check_varying(one: MeshLayout, other: MeshLayout) -> None:
    if one.varying != other.varying:
        raise ValueError(
            f"{_OP}: from {one} to {other}: an axis varies in one of them only. Nothing moves along an axis "
            "whose values vary; say what they are (a shard, partial) to move them."
        )


def _submesh(mesh: DeviceMesh, axes: list[int]) -> DeviceMesh:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"{_OP}: an axis of {mesh} varies. Give the mesh mesh_dim_names, to leave the axis out."
        )
    return mesh[tuple(names[axis] for axis in axes)]


def _spec(
    mesh: DeviceMesh, layout: MeshLayout, kept: list[int], shape: tuple[int, ...], local: Tensor
) -> DTensorSpec:
    """``layout`` as a spec on ``mesh``, which has the axes ``kept``."""
    placements = tuple(counted_from_0(one, len(shape)) for one in layout.placements if one is not None)
    order = None
    if layout.order is not None:
        order = tuple(
            ShardOrderEntry(dim, tuple(kept.index(axis) for axis in axes)) for dim, axes in layout.order
        )
    return DTensorSpec(
        mesh,
        placements,
        tensor_meta=TensorMeta(torch.Size(shape), dense_strides_like(local, shape), local.dtype),
        shard_order=order,  # type: ignore[arg-type]
    )


class _Move(torch.autograd.Function):
    """``local`` of spec ``src`` under ``dst``; its gradient comes under the spec ``of_gradient``. It is its
    own gradient, so it is differentiable again."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        src: DTensorSpec,
        dst: DTensorSpec,
        of_gradient: DTensorSpec,
        how: How,
        is_explicit: bool,
    ) -> Tensor:
        ctx.src, ctx.of_gradient, ctx.how = src, of_gradient, how
        result = how.run(local, src, dst, is_explicit)
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        held = ctx.of_gradient
        placements = tuple(
            Replicate() if wanted.is_partial() and not one.is_partial() else wanted
            for one, wanted in zip(held.placements, ctx.src.placements, strict=True)
        )
        target = _with_placements(ctx.src, placements)
        again = _with_placements(target, tuple(_unreduced(one) for one in placements))
        moved = _Move.apply(grad, held, target, again, ctx.how, False)
        return moved, None, None, None, None, None


def _unreduced(placement: Placement) -> Placement:
    return Replicate() if placement.is_partial() else placement


def _with_placements(spec: DTensorSpec, placements: tuple[Placement, ...]) -> DTensorSpec:
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta, shard_order=spec.shard_order)
