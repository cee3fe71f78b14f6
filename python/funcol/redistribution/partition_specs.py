"""Layouts of plain tensors: placements, or partition specs, which list the mesh axes that cut each dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

Axis: TypeAlias = str | int
"""A mesh axis, by its name or its number."""


@dataclass(frozen=True)
class Varying:
    """In the place of a placement: the axis' ranks hold values of their own, which belong to no one tensor.

    Nothing moves along such an axis: source and target both have to say so.
    """


class PartitionSpec:
    """The mesh axes that cut each dim of a tensor, first cut first; the tensor is replicated on other axes.

    ``PartitionSpec(("dp", "tp"), None)``: dp cuts the rows, tp each of dp's parts, and no axis the columns.
    Entries are axes, tuples of axes, or ``None``; dims without an entry are not cut. A plain tuple of such
    entries means the same.

    ``partial`` says of axes how their ranks' values are reduced, ``{"cp": "sum"}``; ``varying`` lists axes
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


@dataclass(frozen=True)
class MeshLayout:
    """A layout, by axis. Axes that vary have no placement."""

    placements: tuple[Placement | None, ...]
    order: tuple[tuple[int, tuple[int, ...]], ...] | None = None

    @property
    def varying(self) -> tuple[int, ...]:
        return tuple(axis for axis, placement in enumerate(self.placements) if placement is None)

    def __str__(self) -> str:
        return str(tuple(placement or Varying() for placement in self.placements))


def mesh_layout(op: str, layout: LayoutLike, mesh: DeviceMesh, num_dims: int) -> MeshLayout:
    """``layout`` of a tensor of ``num_dims`` dims. ``ValueError`` or ``TypeError`` if it is none."""
    if not isinstance(layout, PartitionSpec):
        entries = tuple(layout)
        if entries and all(isinstance(entry, (Placement, Varying)) for entry in entries):
            return _of_placements(op, entries, mesh)
        layout = PartitionSpec(*entries)
    return _Reader(op, layout, mesh, num_dims).read()


def _of_placements(op: str, entries: tuple[Any, ...], mesh: DeviceMesh) -> MeshLayout:
    if len(entries) != mesh.ndim:
        raise ValueError(
            f"{op}: {len(entries)} placements for the {mesh.ndim} axes of {mesh}. Pass one for each."
        )
    return MeshLayout(tuple(None if isinstance(entry, Varying) else entry for entry in entries))


class _Reader:
    """Reads a partition spec."""

    def __init__(self, op: str, spec: PartitionSpec, mesh: DeviceMesh, num_dims: int) -> None:
        self._op = op
        self._spec = spec
        self._mesh = mesh
        self._num_dims = num_dims
        self._names = list(mesh.mesh_dim_names or ())
        self._placements: dict[int, Placement | None] = {}

    def read(self) -> MeshLayout:
        spec = self._spec
        if len(spec.dims) > self._num_dims:
            raise ValueError(
                f"{self._op}: {spec} has {len(spec.dims)} entries, the tensor {self._num_dims} dims. Pass at "
                "most one for each dim."
            )
        order = []
        for dim, entry in enumerate(spec.dims):
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            found = tuple(self._put(axis, Shard(dim)) for axis in axes)
            if found:
                order.append((dim, found))
        for axis, reduce_op in spec.partial.items():
            self._put(axis, Partial(reduce_op))
        for axis in spec.varying:
            self._put(axis, None)
        placements = tuple(self._placements.get(axis, Replicate()) for axis in range(self._mesh.ndim))
        is_usual = all(list(axes) == sorted(axes) for _, axes in order)
        return MeshLayout(placements, None if is_usual else tuple(order))

    def _put(self, axis: Axis, placement: Placement | None) -> int:
        number = self._number(axis)
        if number in self._placements:
            raise ValueError(
                f"{self._op}: {self._spec} names the mesh axis {axis!r} twice. Name each axis once."
            )
        self._placements[number] = placement
        return number

    def _number(self, axis: Axis) -> int:
        if isinstance(axis, str) and axis in self._names:
            return self._names.index(axis)
        if isinstance(axis, int) and not isinstance(axis, bool) and 0 <= axis < self._mesh.ndim:
            return axis
        known: list[Any] = self._names or [*range(self._mesh.ndim)]
        raise ValueError(f"{self._op}: {self._spec} names the mesh axis {axis!r}. There are {known}.")
