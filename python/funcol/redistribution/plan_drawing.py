"""A plan drawn as SVG: which block of the tensor each rank holds at first and after each step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from xml.sax.saxutils import escape

from .cost_models import axis_names
from .planning import Plan

MOST_RANKS = 64

_CELL = 96.0  # the longer side of a tensor, in pixels
_THINNEST = 18.0
_GAP = 14.0
_LABEL = 15.0
_MARGIN = 16.0
_STYLE = (
    "text{font-family:sans-serif;font-size:11px;fill:#222}.title{font-size:14px;font-weight:bold}"
    ".step{font-size:13px}.whole{fill:#fff;stroke:#999}"
)
_PARTIAL_PATTERN = (
    '<pattern id="partial" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2" height="6" fill="#fff" fill-opacity="0.75"/></pattern>'
)


def plan_as_svg(plan: Plan) -> str:
    """A panel for the source and one after each step; in it a cell a rank, laid out as the mesh is.

    A cell is the whole tensor in outline; the block that the rank holds is filled, hatched where it is a
    partial value. The last two dims are drawn, of a tensor with more dims those that the plan shards.
    ``ValueError`` for meshes of more than :data:`MOST_RANKS` ranks.
    """
    num_ranks = math.prod(plan.mesh.sizes)
    if num_ranks > MOST_RANKS:
        raise ValueError(f"funcol: a drawing of {num_ranks} ranks cannot be read; the most is {MOST_RANKS}.")
    return _Drawing(plan).svg()


class _Drawing:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._coordinates = list(product(*map(range, plan.mesh.sizes)))
        self._columns = plan.mesh.sizes[-1]
        self._rows = len(self._coordinates) // self._columns
        self._dims = _drawn_dims(plan, self._coordinates)
        heights = [plan.shape[dim] for dim in self._dims]
        rows, columns = (1, *heights)[-2:] if heights else (1, 1)
        longer = max(rows, columns, 1)
        self._height = max(_CELL * rows / longer, _THINNEST)
        self._width = max(_CELL * columns / longer, _THINNEST)
        self._column_step = max(self._width, _CELL) + _GAP
        self._row_step = self._height + _LABEL + _GAP

    def svg(self) -> str:
        panel_height = self._rows * self._row_step + 2 * _LABEL
        num_panels = len(self._plan.steps) + 1
        width = 2 * _MARGIN + max(self._columns * self._column_step, 480.0)
        height = 2 * _MARGIN + 2 * _LABEL + num_panels * panel_height
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}">',
            f"<style>{_STYLE}</style><defs>{_PARTIAL_PATTERN}</defs>",
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
            _text(_MARGIN, _MARGIN + _LABEL, self._title(), "title"),
        ]
        for panel in range(num_panels):
            lines += self._panel(panel, _MARGIN + 2 * _LABEL + panel * panel_height)
        return "\n".join([*lines, "</svg>"]) + "\n"

    def _title(self) -> str:
        shape = self._plan.shape
        title = f"{self._plan.src} -> {self._plan.dst}, tensor of shape {tuple(shape)}"
        if len(shape) > 2:
            title += f", drawn: dims {' and '.join(map(str, self._dims))}"
        return title

    def _panel(self, num_steps: int, top: float) -> Iterator[str]:
        layout = self._plan.src if num_steps == 0 else self._plan.steps[num_steps - 1].after
        what = "source" if num_steps == 0 else f"{num_steps}. {self._plan.steps[num_steps - 1]}"
        yield '<g class="panel">'
        yield _text(_MARGIN, top + _LABEL, f"{what}: {layout}", "step")
        for rank, coordinate in enumerate(self._coordinates):
            left = _MARGIN + rank % self._columns * self._column_step
            cell_top = top + 2 * _LABEL + rank // self._columns * self._row_step
            yield from self._cell(rank, num_steps, coordinate, layout, left, cell_top)
        yield "</g>"

    def _cell(
        self, rank: int, num_steps: int, coordinate: tuple[int, ...], layout: str, left: float, top: float
    ) -> Iterator[str]:
        names = axis_names(self._plan.mesh)
        where = " ".join(f"{name}{index}" for name, index in zip(names, coordinate, strict=True))
        fills = [f"hsl({360 * rank / len(self._coordinates):.0f},60%,55%)"]
        if "P(" in layout:
            fills.append("url(#partial)")
        yield '<g class="rank">'
        yield _rectangle(left, top, self._width, self._height, 'class="whole"')
        for x, y, width, height in self._blocks(num_steps, coordinate):
            for fill in fills:
                yield _rectangle(left + x, top + y, width, height, f'class="block" fill="{fill}"')
        yield _text(left, top + self._height + _LABEL - 3, f"{rank}: {where}", "label")
        yield "</g>"

    def _blocks(
        self, num_steps: int, coordinate: tuple[int, ...]
    ) -> Iterator[tuple[float, float, float, float]]:
        held = self._plan.local_indices(num_steps, list(coordinate))
        if not all(held):  # An empty interval list in any dim, a drawn one or not: nothing is held.
            return
        extents: list[list[tuple[float, float]]] = [[(0.0, 1.0)], [(0.0, 1.0)]]
        for place, dim in enumerate(reversed(self._dims)):
            size = self._plan.shape[dim]
            extents[1 - place] = [(begin / size, length / size) for begin, length in held[dim]]
        for (y, height), (x, width) in product(*extents):
            yield x * self._width, y * self._height, width * self._width, height * self._height


def _drawn_dims(plan: Plan, coordinates: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Up to two dims, ascending: the sharded ones, then the last ones."""
    num_dims = len(plan.shape)
    if num_dims <= 2:
        return tuple(range(num_dims))
    sharded = [
        dim
        for dim in range(num_dims)
        if any(
            sum(size for _, size in plan.local_indices(num_steps, list(coordinate))[dim]) != plan.shape[dim]
            for num_steps in range(len(plan.steps) + 1)
            for coordinate in coordinates
        )
    ]
    others = [dim for dim in reversed(range(num_dims)) if dim not in sharded]
    return tuple(sorted([*sharded, *others][:2]))


def _rectangle(x: float, y: float, width: float, height: float, attributes: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {attributes}/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'
