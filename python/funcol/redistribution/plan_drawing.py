"""A plan as SVG, and as HTML for notebooks: which block each rank holds at first and after each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from xml.sax.saxutils import escape

from .cost_models import axis_names
from .plan_tables import Rows, check_pieces, coordinates, described_tensor, layouts, num_ranks, step_rows
from .planning import Plan

MOST_RANKS = 64

_CELL = 96.0  # the longer side of a tensor, in pixels
_THINNEST = 18.0
_GAP = 14.0
_LABEL = 15.0
_MARGIN = 16.0
# Each rule names the drawing's class, since a page's other drawings see the rules, too.
_STYLE = "".join(
    f".funcol-plan {rule}"
    for rule in (
        "text{font-family:sans-serif;font-size:11px;fill:#222}",
        ".title{font-size:14px;font-weight:bold}",
        ".step{font-size:13px}",
        ".whole{fill:#fff;stroke:#999}",
    )
)
_PARTIAL_PATTERN = (
    '<pattern id="partial" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2" height="6" fill="#fff" fill-opacity="0.75"/></pattern>'
)


def plan_as_svg(plan: Plan, ranks: Sequence[int] | None = None) -> str:
    """A panel for the source and one after each step; in it a cell a rank, laid out as the mesh is.

    A cell is the whole tensor in outline; the block that the rank holds is filled, hatched where it is a
    partial value. The last two dims are drawn, of a tensor with more dims those that the plan shards.
    ``ranks`` are the numbers of the ranks in the order of the mesh, by default 0, 1, 2 and so on.
    ``ValueError`` for meshes of more than :data:`MOST_RANKS` ranks, and for blocks of more pieces than can be
    seen.
    """
    if num_ranks(plan) > MOST_RANKS:
        raise ValueError(
            f"funcol: a drawing of {num_ranks(plan)} ranks cannot be read; the most is {MOST_RANKS}."
        )
    check_pieces(plan)
    return _Drawing(plan, ranks).svg()


def plan_as_html(plan: Plan, ranks: Sequence[int] | None = None) -> str:
    """The steps as a table and, of up to :data:`MOST_RANKS` ranks, the drawing of :func:`plan_as_svg`."""
    parts = [f"<p>{escape(f'{plan.src} -> {plan.dst}, {described_tensor(plan)}')}</p>"] if plan.steps else []
    if plan.steps:
        parts.append(_html_table(step_rows(plan)))
        if hint := plan.hint:
            parts.append(f"<p>{escape(hint)}</p>")
    if num_ranks(plan) <= MOST_RANKS:
        parts.append(plan_as_svg(plan, ranks))
    else:
        parts.append(
            f"<p>No drawing: {num_ranks(plan)} ranks are more than the {MOST_RANKS} it may have.</p>"
        )
    return f"<div>{''.join(parts)}</div>"


def _html_table(rows: Rows) -> str:
    def line(row: Sequence[str], cell: str) -> str:
        return f"<tr>{''.join(f'<{cell}>{escape(text)}</{cell}>' for text in row)}</tr>"

    return f"<table>{line(rows[0], 'th')}{''.join(line(row, 'td') for row in rows[1:])}</table>"


class _Drawing:
    def __init__(self, plan: Plan, ranks: Sequence[int] | None) -> None:
        self._plan = plan
        self._ranks = range(num_ranks(plan)) if ranks is None else ranks
        self._coordinates = list(coordinates(plan, MOST_RANKS))
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
            '<svg class="funcol-plan" xmlns="http://www.w3.org/2000/svg" '
            f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
            f"<style>{_STYLE}</style><defs>{_PARTIAL_PATTERN}</defs>",
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
            _text(_MARGIN, _MARGIN + _LABEL, self._title(), "title"),
        ]
        for panel in range(num_panels):
            lines += self._panel(panel, _MARGIN + 2 * _LABEL + panel * panel_height)
        return "\n".join([*lines, "</svg>"]) + "\n"

    def _title(self) -> str:
        shape = self._plan.shape
        ends = f"{self._plan.src} -> {self._plan.dst}" if self._plan.steps else self._plan.src
        title = f"{ends}, tensor of shape {tuple(shape)}"
        if len(shape) > 2:
            title += f", drawn: dims {' and '.join(map(str, self._dims))}"
        return title

    def _panel(self, num_steps: int, top: float) -> Iterator[str]:
        layout = layouts(self._plan)[num_steps]
        what = "source" if num_steps == 0 else f"{num_steps}. {self._plan.steps[num_steps - 1]}"
        if not self._plan.steps:
            what = "layout"
        yield '<g class="panel">'
        yield _text(_MARGIN, top + _LABEL, f"{what}: {layout}", "step")
        for place, coordinate in enumerate(self._coordinates):
            left = _MARGIN + place % self._columns * self._column_step
            cell_top = top + 2 * _LABEL + place // self._columns * self._row_step
            yield from self._cell(place, num_steps, coordinate, layout, left, cell_top)
        yield "</g>"

    def _cell(
        self, place: int, num_steps: int, coordinate: tuple[int, ...], layout: str, left: float, top: float
    ) -> Iterator[str]:
        names = axis_names(self._plan.mesh)
        where = " ".join(f"{name}{index}" for name, index in zip(names, coordinate, strict=True))
        fills = [f"hsl({360 * place / len(self._coordinates):.0f},60%,55%)"]
        if "P(" in layout:
            fills.append("url(#partial)")
        yield '<g class="rank">'
        yield _rectangle(left, top, self._width, self._height, 'class="whole"')
        for x, y, width, height in self._blocks(num_steps, coordinate):
            for fill in fills:
                yield _rectangle(left + x, top + y, width, height, f'class="block" fill="{fill}"')
        yield _text(left, top + self._height + _LABEL - 3, f"{self._ranks[place]}: {where}", "label")
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
