"""Layouts that are found from values: how the tensors of the ranks make up the reference's tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .recording import RecordedTensor

Layout = dict[int, str]  # an axis of the mesh -> "R", "S<dim>", "Z<dim>" (zigzag), "P(<reduction>)"
Tensors = dict[tuple[int, ...], Tensor]  # by the coordinate of the rank
Reductions = Literal["none", "declared", "any"]  # declared: or sums and means where nothing is declared

_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "P(sum)": torch.sum,
    "P(avg)": torch.mean,
    "P(max)": torch.amax,
    "P(min)": torch.amin,
}
_MOST_TRIED = 3000  # combinations of a search


@dataclass
class RankTensors:
    """The tensors of the ranks by their coordinates on a mesh. ``declared`` has the op of each axis that a
    DTensor's placements name, the weight has, or the user declared. Differences up to ``bound`` are
    round-off."""

    names: list[str]  # of the axes
    sizes: tuple[int, ...]
    tensors: Tensors
    ranks: dict[tuple[int, ...], int]
    declared: Layout
    bound: float

    def equal(self, value: Tensor, target: Tensor) -> bool:
        if value.shape != target.shape:
            return False
        if not target.is_floating_point() or not target.numel():
            return torch.equal(value, target)
        difference = (value - target).abs()
        difference = torch.where((value == target) | (value.isnan() & target.isnan()), 0.0, difference)
        return bool(difference.max() <= self.bound)

    def text(self, layout: Layout, only: str = "") -> str:
        """Returns the layout, on axes of several ranks, or the names of those whose op begins with
        ``only``."""
        shown = [(self.names[axis], op) for axis, op in sorted(layout.items()) if self.sizes[axis] > 1]
        if only:
            return ", ".join(name for name, op in shown if op.startswith(only))
        return ", ".join(f"{name}: {op}" for name, op in shown)

    def varying(self) -> list[int]:
        """Returns the axes along which ranks have different values."""
        return [
            axis
            for axis in range(len(self.sizes))
            if not all(self.equal(x, line[0]) for line in _lines(self.tensors, axis).values() for x in line)
        ]

    def layout_of(self, target: Tensor, reductions: Reductions = "declared") -> Layout | None:
        """Returns the layout in which the tensors make up ``target``, None if there is none."""
        found = self.assemblies(target, reductions)
        return next((layout for layout, value in found if self.equal(value, target)), None)

    def assemblies(self, target: Tensor, reductions: Reductions = "none") -> Iterator[tuple[Layout, Tensor]]:
        """Yields each layout that may be that of the tensors, and the tensor that they make up in it: with
        the number of dims of ``target``, and its shape or another.

        Axes are taken one after the other, the last first, or in another order for shards of a dim that were
        cut so: the tensors along an axis are equal (R), are concatenated (S), or are reduced (P).
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
            for op, joined in self._join_lines(_lines(tensors, axis), target):
                if self._allows(axis, op, reductions) and not (is_replicated and op[0] == "P"):
                    is_replicated |= op == "R"
                    yield from join(joined, axes[1:], {**layout, axis: op})

        if any(one.ndim != target.ndim for one in self.tensors.values()):
            return
        axes = [*reversed(range(len(self.sizes)))]
        for order in itertools.permutations(axes):
            in_order = [*order] == axes
            yield from join(self.tensors, order, {})

    def _allows(self, axis: int, op: str, reductions: Reductions) -> bool:
        declared = self.declared.get(axis)
        if not op.startswith("P"):
            return declared in (None, op)
        is_usual = op in ("P(sum)", "P(avg)") and (declared is None or reductions == "any")
        return reductions != "none" and (is_usual or declared == op)

    def _join_lines(
        self, lines: Mapping[tuple[int, ...], list[Tensor]], target: Tensor
    ) -> Iterator[tuple[str, Tensors]]:
        """Yields each op that is possible, and what it makes of every line."""
        same_shape = all(one.shape == line[0].shape for line in lines.values() for one in line)
        if same_shape and all(self.equal(one, line[0]) for line in lines.values() for one in line[1:]):
            yield "R", {at: line[0] for at, line in lines.items()}
        for dim, size in enumerate(target.shape):
            rests = [{(*one.shape[:dim], *one.shape[dim + 1 :]) for one in line} for line in lines.values()]
            first = next(iter(lines.values()))
            is_too_large = sum(one.shape[dim] for one in first) > size and size % len(first) == 0
            if any(len(rest) > 1 for rest in rests) or is_too_large:
                continue
            yield f"S{dim}", {at: torch.cat(line, dim) for at, line in lines.items()}
            if same_shape and all(len(line) > 1 and line[0].shape[dim] % 2 == 0 for line in lines.values()):
                yield f"Z{dim}", {at: _undo_zigzag(line, dim) for at, line in lines.items()}
        if same_shape:
            for op, reduction in _REDUCTIONS.items():
                if op == "P(sum)" or all(line[0].is_floating_point() for line in lines.values()):
                    yield op, {at: reduction(torch.stack(line), dim=0) for at, line in lines.items()}


def place_on_mesh(
    values: Sequence[RecordedTensor | None], mesh: Tensor, names: Sequence[str], bound: float
) -> RankTensors | None:
    """Places the tensors of the ranks on ``mesh``, or on a part of it if other ranks have none; returns None
    if no rank has one."""
    present = {rank: one for rank, one in enumerate(values) if one is not None and one.local is not None}
    if not present:
        return None
    grid, axes = torch.tensor(sorted(present)), ["ranks"]
    # Stages of a pipeline have one index of an axis.
    for chosen in (mesh, *(one for axis in range(mesh.ndim) for one in torch.split(mesh, 1, axis))):
        if sorted(chosen.flatten().tolist()) == sorted(present):
            grid, axes = chosen, [*names]
            break
    ranks = {at: int(grid[at]) for at in itertools.product(*map(range, grid.shape))}
    declared: Layout = {}
    for axis in range(grid.ndim):
        line = {rank for at, rank in ranks.items() if not any(at[:axis] + at[axis + 1 :])}
        for op, along in present[int(grid.flatten()[0])].placements:
            if line <= {*along}:
                declared[axis] = op
    tensors = {at: one for at, rank in ranks.items() if (one := present[rank].local) is not None}
    return RankTensors(axes, tuple(grid.shape), tensors, ranks, declared, bound)


def _lines(tensors: Tensors, axis: int) -> dict[tuple[int, ...], list[Tensor]]:
    """Returns the tensors along the axis, by the coordinate of the first one."""
    lines: dict[tuple[int, ...], list[Tensor]] = {}
    for at in sorted(tensors):
        lines.setdefault((*at[:axis], 0, *at[axis + 1 :]), []).append(tensors[at])
    return lines


def _undo_zigzag(line: list[Tensor], dim: int) -> Tensor:
    """Returns the tensor whose 2n chunks the n ranks share so that rank i has chunks i and 2n - 1 - i."""
    halves = [one.chunk(2, dim) for one in line]
    return torch.cat([a for a, *_ in halves] + [b[-1] for b in reversed(halves)], dim)
