"""Layouts that are found from values: how the tensors of the ranks make up the reference's tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .recording import Value

Same = Callable[[Tensor, Tensor], bool]
Layout = dict[int, str]  # an axis of the mesh -> "R", "S<dim>", "Z<dim>" (zigzag), "P(<reduction>)"
Allowed = Callable[[int, str], bool]  # an axis and an op
Tensors = dict[tuple[int, ...], Tensor]  # by the coordinate of the rank

_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "P(sum)": torch.sum,
    "P(avg)": torch.mean,
    "P(max)": torch.amax,
    "P(min)": torch.amin,
}
_MOST_TRIED = 3000  # combinations of a search


@dataclass
class Parts:
    """The tensors of the ranks by their coordinates on a mesh. ``declared`` has the op of each axis that a
    DTensor's placements name, the weight has, or the user declared."""

    names: list[str]  # of the axes
    sizes: tuple[int, ...]
    tensors: Tensors
    ranks: dict[tuple[int, ...], int]
    declared: Layout

    def allows(self, axis: int, op: str) -> bool:
        """True for the declared op of the axis; for any, but maxima and minima, if none is declared."""
        if axis in self.declared:
            return self.declared[axis] == op
        return op not in ("P(max)", "P(min)")

    def allows_complete(self, axis: int, op: str) -> bool:
        """The same, but for ops that need a reduction."""
        return not op.startswith("P") and self.allows(axis, op)

    def text(self, layout: Layout, only: str = "") -> str:
        """The layout on axes of more than one rank, or the names of those whose op starts with ``only``."""
        shown = [(self.names[axis], op) for axis, op in sorted(layout.items()) if self.sizes[axis] > 1]
        if only:
            return ", ".join(name for name, op in shown if op.startswith(only))
        return ", ".join(f"{name}: {op}" for name, op in shown)

    def varying(self, same: Same) -> list[int]:
        """The axes along which ranks have other values."""
        return [
            axis
            for axis in range(len(self.sizes))
            if not all(same(one, line[0]) for line in _lines(self.tensors, axis).values() for one in line)
        ]


def parts_of(values: Sequence[Value | None], mesh: Tensor, names: Sequence[str]) -> Parts | None:
    """Places the tensors of the ranks on ``mesh``, or on a part of it if others have none; None if no rank
    has one."""
    present = {rank: one for rank, one in enumerate(values) if one is not None and one.local is not None}
    grid, axes = torch.tensor(sorted(present)), ["ranks"]
    # Stages of a pipeline have one index of an axis.
    for chosen in (mesh, *(one for axis in range(mesh.ndim) for one in torch.split(mesh, 1, axis))):
        if sorted(chosen.flatten().tolist()) == sorted(present):
            grid, axes = chosen, [*names]
            break
    if not present:
        return None
    ranks = {at: int(grid[at]) for at in itertools.product(*map(range, grid.shape))}
    declared: Layout = {}
    for axis, size in enumerate(grid.shape):
        line = {ranks[(*(0,) * axis, i, *(0,) * (grid.ndim - axis - 1))] for i in range(size)}
        for op, along in present[ranks[(0,) * grid.ndim]].placements:
            if line <= {*along}:
                declared[axis] = op
    tensors = {at: one for at, rank in ranks.items() if (one := present[rank].local) is not None}
    return Parts(axes, tuple(grid.shape), tensors, ranks, declared)


def assembled(parts: Parts, target: Tensor, equal: Same, allows: Allowed) -> Iterator[tuple[Layout, Tensor]]:
    """Yields each layout that may be that of the tensors, and the tensor that they make up in it: with the
    number of dims of ``target``, and its shape or another.

    Axes are taken one after the other, the last first, or in another order for shards of a dim that were cut
    so: the tensors along an axis are ``equal`` (R), are concatenated (S), or are reduced (P).
    """
    tried = itertools.count()

    def join(tensors: Tensors, axes: Sequence[int], layout: Layout) -> Iterator[tuple[Layout, Tensor]]:
        if next(tried) > _MOST_TRIED:
            return
        if not axes:
            cut = [op for op in layout.values() if op[0] in "SZ"]
            if in_order or len(cut) > len(set(cut)):
                yield layout, next(iter(tensors.values()))
            return
        axis, is_replicated = axes[0], False
        for op, joined in _joined(_lines(tensors, axis), target, equal):
            if allows(axis, op) and not (is_replicated and op[0] == "P"):
                is_replicated |= op == "R"
                yield from join(joined, axes[1:], {**layout, axis: op})

    if any(one.ndim != target.ndim for one in parts.tensors.values()):
        return
    axes = [*reversed(range(len(parts.sizes)))]
    for order in itertools.permutations(axes):
        in_order = [*order] == axes
        yield from join(parts.tensors, order, {})


def _lines(tensors: Tensors, axis: int) -> dict[tuple[int, ...], list[Tensor]]:
    """The tensors along the axis, by the coordinate of the first one."""
    lines: dict[tuple[int, ...], list[Tensor]] = {}
    for at in sorted(tensors):
        lines.setdefault((*at[:axis], 0, *at[axis + 1 :]), []).append(tensors[at])
    return lines


def _joined(
    lines: Mapping[tuple[int, ...], list[Tensor]], target: Tensor, equal: Same
) -> Iterator[tuple[str, Tensors]]:
    """Yields each op that is possible, and what it makes of every line."""
    alike = all(one.shape == line[0].shape for line in lines.values() for one in line)
    if alike and all(equal(one, line[0]) for line in lines.values() for one in line[1:]):
        yield "R", {at: line[0] for at, line in lines.items()}
    for dim, size in enumerate(target.shape):
        rests = [{(*one.shape[:dim], *one.shape[dim + 1 :]) for one in line} for line in lines.values()]
        first = next(iter(lines.values()))
        is_too_large = sum(one.shape[dim] for one in first) > size and size % len(first) == 0
        if any(len(rest) > 1 for rest in rests) or is_too_large:
            continue
        yield f"S{dim}", {at: torch.cat(line, dim) for at, line in lines.items()}
        if alike and all(len(line) > 1 and line[0].shape[dim] % 2 == 0 for line in lines.values()):
            yield f"Z{dim}", {at: _unzigzagged(line, dim) for at, line in lines.items()}
    if alike:
        for op, reduction in _REDUCTIONS.items():
            if op == "P(sum)" or all(line[0].is_floating_point() for line in lines.values()):
                yield op, {at: reduction(torch.stack(line), dim=0) for at, line in lines.items()}


def _unzigzagged(line: list[Tensor], dim: int) -> Tensor:
    """The tensor whose 2n chunks the n ranks share so that rank i has chunks i and 2n - 1 - i."""
    halves = [one.chunk(2, dim) for one in line]
    return torch.cat([a for a, *_ in halves] + [b[-1] for b in reversed(halves)], dim)
