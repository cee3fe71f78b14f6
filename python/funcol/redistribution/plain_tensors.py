"""Redistribution of plain tensors, whose layouts the caller states: as placements, or as partition specs,
which list the mesh axes that cut each dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

from .cost_models import CostModel
from .local_redistribute import RedistributionOptions, redistribution_options
from .specs import dense_strides_like, gradient_placements, gradient_spec, with_nonnegative_dim

_OP = "funcol::redistribute_tensor"

Axis: TypeAlias = str | int
"""A mesh axis, by its name or its number."""


@dataclass(frozen=True)
class Varying:
    """An entry among placements: the axis' ranks hold values of their own, which belong to no one tensor.

    Nothing moves along such an axis: source and target must both have it.
    """


class PartitionSpec:
    """The mesh axes that cut each dim of a tensor, first cut first; the tensor is replicated on other axes.

    ``PartitionSpec(("dp", "tp"), None)``: dp cuts the rows, tp each of dp's parts, and no axis the columns.
    Entries are axes, tuples of axes, or ``None``; dims without an entry are not cut. A plain tuple of such
    entries means the same.

    ``partial`` maps axes to the reduction of their ranks' values, ``{"cp": "sum"}``; ``varying`` lists axes
    whose ranks hold values of their own (:class:`Varying`). The form is that of
    ``jax.sharding.PartitionSpec``.
    """

    def __init__(
        self, *dims: Any, partial: Mapping[Axis, str] | None = None, varying: Sequence[Axis] = ()
    ) -> None:
        self.dims = dims
        self.partial = dict(partial or {})
        self.varying = tuple(varying)

    def _key(self) -> Any:
        return self.dims, tuple(self.partial.items()), self.varying

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartitionSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        parts = [*map(repr, self.dims)]
        parts += [f"partial={self.partial}"] if self.partial else []
        parts += [f"varying={self.varying}"] if self.varying else []
        return f"PartitionSpec({', '.join(parts)})"


LayoutLike: TypeAlias = Sequence[Placement | Varying] | PartitionSpec | tuple[Any, ...]
"""Placements, one for each mesh axis (:class:`Varying` among them), or a partition spec."""


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
    """Redistributes ``local``, this rank's part of a tensor of ``shape`` under ``src``, to ``dst``.

    Layouts are placements, one for each axis of ``mesh``, or partition specs
    (:class:`funcol.redistribution.PartitionSpec`, or a plain tuple): for each dim the mesh axes that cut it,
    first cut first::

        rows = redistribute_tensor(x, mesh, (("dp", "tp"), None), ("dp", "tp"), shape=(1024, 512))

    Both forms state the axes on which values are partial or vary (:class:`funcol.redistribution.Varying`);
    ``shape`` is then that of the tensor on the other axes. All ranks of the mesh must make the same call. The
    result is like that of :func:`funcol.redistribution.redistribute_local_tensor`: contiguous and in memory
    of its own, or ``local`` if there is nothing to do.

    The call is differentiable any number of times, by the rules of :func:`funcol.redistribute`: the gradient
    of the result has the layout ``grad`` (default: ``dst``, replicated where it is partial), and is
    redistributed to ``src``, but replicated where ``src`` is partial and the gradient is not. Pass ``grad``
    where ranks use a replicated result for work of their own: ``grad=PartitionSpec(partial={"tp": "sum"})``
    reduces their gradients.

    ``torch.compile`` and ``make_fx`` trace the collectives; symbolic sizes in ``shape`` stay symbols, except
    where ``dst`` makes partial values. The other arguments are constants of a compiled region.

    ``async_op``, ``cost_model``, ``max_bytes`` and the errors are those of
    :func:`funcol.redistribution.redistribute_local_tensor`. Also raises ``ValueError`` for a layout that
    names an axis twice or an unknown axis, and if an axis varies in one layout only.

    PyTorch counterpart: ``DTensor.from_local(...).redistribute(...).to_local()``.
    """
    sizes = tuple(shape)
    given = (src, dst) if grad is None else (src, dst, grad)
    layouts = [_layout(layout, mesh, len(sizes)) for layout in given]
    for layout in layouts[1:]:
        _check_varying(layouts[0], layout)
    kept = [axis for axis in range(mesh.ndim) if axis not in layouts[0].varying]
    if not kept:
        return local
    submesh = mesh if len(kept) == mesh.ndim else _submesh(mesh, kept)
    before, after, *rest = (_spec(submesh, layout, kept, sizes, local) for layout in layouts)
    options = redistribution_options(submesh, async_op, cost_model, max_bytes)
    if not (torch.is_grad_enabled() and local.requires_grad):
        return options.run(local, before, after, is_explicit=True)
    of_gradient = rest[0] if rest else gradient_spec(after)
    return _RedistributeLocal.apply(local, before, after, of_gradient, options, True)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Layout:
    """A layout, by axis. Axes that vary have no placement."""

    placements: tuple[Placement | None, ...]
    order: tuple[tuple[int, tuple[int, ...]], ...] | None = None

    @property
    def varying(self) -> tuple[int, ...]:
        return tuple(axis for axis, placement in enumerate(self.placements) if placement is None)

    def __str__(self) -> str:
        return str(tuple(placement or Varying() for placement in self.placements))


def _layout(layout: LayoutLike, mesh: DeviceMesh, num_dims: int) -> _Layout:
    """Returns ``layout``, for ``num_dims`` dims, by axis. Raises ValueError or TypeError if it is invalid."""
    if isinstance(layout, PartitionSpec):
        return _of_partition_spec(layout, mesh, num_dims)
    entries = tuple(layout)
    if not entries or not all(isinstance(entry, (Placement, Varying)) for entry in entries):
        return _of_partition_spec(PartitionSpec(*entries), mesh, num_dims)
    if len(entries) != mesh.ndim:
        raise ValueError(
            f"{_OP}: {len(entries)} placements for the {mesh.ndim} axes of {mesh}. Pass one for each."
        )
    return _Layout(tuple(None if isinstance(entry, Varying) else entry for entry in entries))


def _of_partition_spec(spec: PartitionSpec, mesh: DeviceMesh, num_dims: int) -> _Layout:
    if len(spec.dims) > num_dims:
        raise ValueError(
            f"{_OP}: {spec} has {len(spec.dims)} entries, the tensor {num_dims} dims. Pass at most one for "
            "each dim."
        )
    placements: dict[int, Placement | None] = {}

    def add_axis(axis: Axis, placement: Placement | None) -> int:
        number = _axis_number(axis, spec, mesh)
        if number in placements:
            raise ValueError(f"{_OP}: {spec} names the mesh axis {axis!r} twice. Name each axis once.")
        placements[number] = placement
        return number

    order = []
    for dim, entry in enumerate(spec.dims):
        axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        found = tuple(add_axis(axis, Shard(dim)) for axis in axes)
        if found:
            order.append((dim, found))
    for axis, reduce_op in spec.partial.items():
        add_axis(axis, Partial(reduce_op))
    for axis in spec.varying:
        add_axis(axis, None)
    is_usual = all(list(axes) == sorted(axes) for _, axes in order)
    by_axis = tuple(placements.get(axis, Replicate()) for axis in range(mesh.ndim))
    return _Layout(by_axis, None if is_usual else tuple(order))


def _axis_number(axis: Axis, spec: PartitionSpec, mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str) and axis in names:
        return names.index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < mesh.ndim:
        return axis
    known: list[Any] = [*(names or range(mesh.ndim))]
    raise ValueError(f"{_OP}: {spec} names the mesh axis {axis!r}. There are {known}.")


def _check_varying(one: _Layout, other: _Layout) -> None:
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
    mesh: DeviceMesh, layout: _Layout, kept: list[int], shape: tuple[int, ...], local: Tensor
) -> DTensorSpec:
    """Returns ``layout`` as a spec on ``mesh``, which has the axes ``kept``."""
    placements = tuple(with_nonnegative_dim(one, len(shape)) for one in layout.placements if one is not None)
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


class _RedistributeLocal(torch.autograd.Function):
    """A move of ``local`` from ``src`` to ``dst``; the gradient of the result has the spec ``of_gradient``.
    The backward pass applies it again, so it is differentiable any number of times."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        src: DTensorSpec,
        dst: DTensorSpec,
        of_gradient: DTensorSpec,
        options: RedistributionOptions,
        is_explicit: bool,
    ) -> Tensor:
        ctx.src, ctx.of_gradient, ctx.options = src, of_gradient, options
        result = options.run(local, src, dst, is_explicit)
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        held = ctx.of_gradient
        placements = gradient_placements(held.placements, ctx.src.placements)
        target = replace(ctx.src, placements=placements)
        moved = _RedistributeLocal.apply(grad, held, target, gradient_spec(target), ctx.options, False)
        return moved, None, None, None, None, None
