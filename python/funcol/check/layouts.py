"""Layouts that are found from values: how the tensors of the ranks make up the reference's tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Same = Callable[[Tensor, Tensor], bool]
Layout = dict[int, str]  # an axis of the mesh -> "R", "S<dim>", "Z<dim>" (zigzag), "P(sum)", "P(avg)"

_MOST_TRIED = 3000  # combinations of a search


@dataclass
class Value:
    """A tensor as a rank has it: the local part, and mesh and placements if it is a DTensor."""

    local: Tensor | None  # None: the rank has none, such as a gradient that nothing reached
    dtype: str = ""
    mesh: Any = None  # ranks of the DTensor's mesh, nested lists
    placements: tuple[str, ...] = ()


@dataclass
class Parts:
    """The tensors of the ranks as an array: ``ranks`` has the global rank at each coordinate, ``allowed`` the
    ops that the placements of a DTensor allow on each axis, or None."""

    ranks: Tensor
    values: dict[int, Tensor]
    names: list[str]
    allowed: list[set[str] | None] = field(default_factory=list)

    def with_any_layout(self) -> Parts:
        return Parts(self.ranks, self.values, self.names, [None] * self.ranks.ndim)


def parts_of(values: Sequence[Value | None], mesh: Tensor, names: Sequence[str]) -> Parts | None:
    """Places what the ranks have on ``mesh``, or on that of the DTensors; None if no rank has a tensor, or
    the ranks with one make up no mesh."""
    present = {r: one for r, one in enumerate(values) if one is not None and one.local is not None}
    tensors = {r: one.local for r, one in present.items() if one.local is not None}
    if not present:
        return None
    ranks, axes = mesh, list(names)
    for axis in reversed(range(mesh.ndim)):  # stages of a pipeline: one index of an axis
        for chosen in torch.split(ranks, 1, axis):
            if sorted(chosen.flatten().tolist()) == sorted(present):
                ranks = chosen
    if sorted(ranks.flatten().tolist()) != sorted(present):
        ranks, axes = torch.tensor(sorted(present)), ["ranks"]
    meshes = {str(one.mesh): one for one in present.values()}
    if "None" in meshes:
        return Parts(ranks, tensors, axes, [None] * ranks.ndim)
    first = next(iter(meshes.values()))
    allowed = _allowed_on(ranks, torch.tensor(first.mesh), first.placements)
    if allowed is not None:
        return Parts(ranks, tensors, axes, allowed)
    shapes = {torch.tensor(one.mesh).shape for one in meshes.values()}
    if len(shapes) > 1:
        return None
    stacked = torch.stack([torch.tensor(one.mesh) for one in meshes.values()])
    if sorted(stacked.flatten().tolist()) != sorted(present):
        return None
    own = [
        _varying(ranks, stacked.movedim(axis, 0).reshape(stacked.shape[axis], -1)[:, 0], axes)
        for axis in range(stacked.ndim)
    ]
    return Parts(stacked, tensors, own, [None, *({one} for one in first.placements)])


def _allowed_on(ranks: Tensor, own: Tensor, placements: Sequence[str]) -> list[set[str] | None] | None:
    """The ops on each axis of ``ranks`` if each axis of the DTensor's mesh is some axes of it."""
    allowed: list[set[str] | None] = [None] * ranks.ndim
    place = {rank: coordinate for coordinate, rank in _coordinates(ranks)}
    for axis, placement in enumerate(placements):
        line = own.movedim(axis, 0).reshape(own.shape[axis], -1)[:, 0].tolist()
        if any(rank not in place for rank in line):
            return None
        here = [place[rank] for rank in line]
        varying = [a for a in range(ranks.ndim) if len({one[a] for one in here}) > 1]
        covered = 1
        for a in varying:
            covered *= ranks.shape[a]
            if allowed[a] is not None:
                return None
            allowed[a] = {placement}
        if covered != len(line):
            return None
    return allowed


def _coordinates(ranks: Tensor) -> Iterator[tuple[tuple[int, ...], int]]:
    for coordinate in itertools.product(*map(range, ranks.shape)):
        yield coordinate, int(ranks[coordinate])


def _varying(ranks: Tensor, line: Tensor, names: Sequence[str]) -> str:
    place = {rank: coordinate for coordinate, rank in _coordinates(ranks)}
    here = [place[rank] for rank in line.tolist() if rank in place]
    found = [name for axis, name in enumerate(names) if len({one[axis] for one in here}) > 1]
    return "_".join(found) or "one rank"


class Search:
    """Looks for the layout in which the tensors of the ranks make up ``target``.

    Axes are taken one after the other, in any order: the tensors along an axis are equal (R), are
    concatenated (S), or are added (P). The first layout whose result is the ``same`` as the target is found.
    ``extra`` are ops beyond those that are allowed. ``near`` is called with results of other shapes.
    """

    def __init__(
        self,
        target: Tensor,
        same: Same,
        *,
        equal: Same | None = None,
        extra: frozenset[str] = frozenset(),
        near: Callable[[Tensor, Layout], None] | None = None,
    ) -> None:
        self._target = target
        self._same = same
        self._equal = equal or same
        self._extra = extra
        self._near = near
        self._tried = 0

    def run(self, parts: Parts) -> Layout | None:
        if any(one.ndim != self._target.ndim for one in parts.values.values()):
            return None
        return self._assemble(parts.ranks, list(range(parts.ranks.ndim)), parts.values, parts.allowed, {})

    def _assemble(
        self,
        ranks: Tensor,
        axes: list[int],
        values: dict[int, Tensor],
        allowed: list[set[str] | None],
        so_far: Layout,
    ) -> Layout | None:
        self._tried += 1
        if self._tried > _MOST_TRIED:
            return None
        if not axes:
            [value] = [values[int(ranks)]]
            if value.shape != self._target.shape:
                if self._near is not None:
                    self._near(value, so_far)
                return None
            return so_far if self._same(value, self._target) else None
        for place in reversed(range(len(axes))):
            axis = axes[place]
            moved = ranks.movedim(place, 0)
            lines = moved.reshape(moved.shape[0], -1).T.tolist()
            rest = axes[:place] + axes[place + 1 :]
            for op, joined in self._joined(lines, values, allowed[axis]):
                found = self._assemble(moved[0], rest, joined, allowed, {**so_far, axis: op})
                if found is not None:
                    return found
        return None

    def _joined(
        self, lines: list[list[int]], values: dict[int, Tensor], allowed: set[str] | None
    ) -> Iterator[tuple[str, dict[int, Tensor]]]:
        """Each op that is possible, and what it makes of every line of ranks, under the line's first rank."""

        def may(op: str) -> bool:
            return allowed is None or op in allowed or op in self._extra

        given = [[values[rank] for rank in line] for line in lines]
        alike = all(one.shape == line[0].shape for line in given for one in line)
        equal = alike and all(self._equal(one, line[0]) for line in given for one in line[1:])
        if equal and may("R"):
            yield "R", {line[0]: values[line[0]] for line in lines}
        for dim in range(self._target.ndim):
            if not may(f"S{dim}"):
                continue
            joined = {line[0]: _concatenated(some, dim) for line, some in zip(lines, given, strict=True)}
            if self._may_fit(joined.values(), dim):
                yield f"S{dim}", joined  # type: ignore[misc]
            zigzag = {line[0]: _unzigzagged(tensors, dim) for line, tensors in zip(lines, given, strict=True)}
            if allowed is None and self._may_fit(zigzag.values(), dim):
                yield f"Z{dim}", zigzag  # type: ignore[misc]
        if alike and not (equal and may("R")):
            sums = {line[0]: torch.stack(tensors).sum(0) for line, tensors in zip(lines, given, strict=True)}
            if may("P(sum)"):
                yield "P(sum)", sums
            if may("P(avg)") and next(iter(values.values())).is_floating_point():
                yield "P(avg)", {rank: one / len(lines[0]) for rank, one in sums.items()}
            for name, most in (("P(max)", torch.amax), ("P(min)", torch.amin)):
                if allowed is not None and name in allowed:
                    yield (
                        name,
                        {
                            line[0]: most(torch.stack(tensors), 0)
                            for line, tensors in zip(lines, given, strict=True)
                        },
                    )

    def _may_fit(self, joined: Any, dim: int) -> bool:
        """True if the tensors can still become the target, whose other dims may be cut along other axes."""
        return all(
            one is not None
            and all(
                mine <= size or (self._near is not None and d == dim)
                for d, (mine, size) in enumerate(zip(one.shape, self._target.shape, strict=True))
            )
            for one in joined
        )


def _concatenated(tensors: list[Tensor], dim: int) -> Tensor | None:
    first = list(tensors[0].shape)
    for one in tensors:
        if [*one.shape[:dim], *one.shape[dim + 1 :]] != [*first[:dim], *first[dim + 1 :]]:
            return None
    return torch.cat(tensors, dim)


def _unzigzagged(tensors: list[Tensor], dim: int) -> Tensor | None:
    """The tensor whose 2n chunks the n ranks share so that rank i has chunks i and 2n - 1 - i."""
    size = tensors[0].shape[dim]
    if len(tensors) < 2 or size % 2 or any(one.shape != tensors[0].shape for one in tensors):
        return None
    halves = [one.chunk(2, dim) for one in tensors]
    return torch.cat([a for a, _ in halves] + [b for _, b in reversed(halves)], dim)
