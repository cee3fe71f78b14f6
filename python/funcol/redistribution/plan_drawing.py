"""Plans as SVG, and as HTML for notebooks: which block each rank holds at first and after each step, and, of
plans between meshes, before and after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from xml.sax.saxutils import escape

from .cost_models import axis_names
from .plan_tables import Rows, check_pieces, coordinates, described_tensor, layouts, num_ranks, step_rows
from .planning import MeshChange, Plan

MOST_RANKS = 64

_CELL = 96.0  # the longer side of a tensor, in pixels
_THINNEST = 18.0
_GAP = 14.0
_LABEL = 15.0
_MARGIN = 16.0
_SQUARE = 34.0  # of the matrix of bytes
_STYLE = (
    "text{font-family:sans-serif;font-size:11px;fill:#222}",
    ".title{font-size:14px;font-weight:bold}",
    ".step{font-size:13px}",
    ".whole{fill:#fff;stroke:#999}",
)
_PARTIAL_PATTERN = (
    '<pattern id="partial" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2" height="6" fill="#fff" fill-opacity="0.75"/></pattern>'
)

Box = tuple[float, float, float, float]  # x, y, width, height, as parts of the full tensor


def plan_as_svg(plan: Plan, ranks: Sequence[int] | None = None) -> str:
    """Draws a panel for the source and one after each step; each has a cell a rank, laid out like the mesh.

    A cell outlines the full tensor; the block that the rank holds is filled, and hatched if it is partial.
    Two dims are drawn: of a tensor with more, those that the plan shards, then the last ones. ``ranks`` are
    the numbers of the ranks in the order of the mesh (default: 0, 1, 2, ...). Raises ``ValueError`` for
    meshes of more than :data:`MOST_RANKS` ranks, and for blocks of more pieces than can be seen.
    """
    _check_count(num_ranks(plan))
    check_pieces(plan)
    return _PlanDrawing(plan, ranks).svg()


def plan_as_html(plan: Plan, ranks: Sequence[int] | None = None) -> str:
    """Returns a table of steps and, up to :data:`MOST_RANKS` ranks, the drawing of :func:`plan_as_svg`."""
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


def mesh_change_as_svg(change: MeshChange) -> str:
    """Draws a row of ranks for the source mesh, one for the target mesh, and the matrix of bytes.

    A cell outlines the full tensor. The block that a source rank holds is filled with the rank's color; the
    block that a target rank wants, with the colors of the ranks that send it, or its own for what it keeps.
    The last two dims are drawn. If values are partial, each rank has the colors of its own. Raises
    ``ValueError`` for more than :data:`MOST_RANKS` ranks.
    """
    _check_count(len(change.ranks))
    return _MeshChangeDrawing(change).svg()


def _check_count(count: int) -> None:
    if count > MOST_RANKS:
        raise ValueError(f"funcol: a drawing of {count} ranks cannot be read; the most is {MOST_RANKS}.")


def _html_table(rows: Rows) -> str:
    def line(row: Sequence[str], cell: str) -> str:
        return f"<tr>{''.join(f'<{cell}>{escape(text)}</{cell}>' for text in row)}</tr>"

    return f"<table>{line(rows[0], 'th')}{''.join(line(row, 'td') for row in rows[1:])}</table>"


class _Drawing:
    """Cells that show the dims ``dims`` of a tensor of ``shape``."""

    def __init__(self, shape: Sequence[int], dims: Sequence[int]) -> None:
        self._shape, self._dims = shape, dims
        rows, columns = (1, 1, *(shape[dim] for dim in dims))[-2:] if dims else (1, 1)
        longer = max(rows, columns, 1)
        self._height = max(_CELL * rows / longer, _THINNEST)
        self._width = max(_CELL * columns / longer, _THINNEST)

    def _document(
        self, attributes: str, style: str, width: float, height: float, title: str, lines: Iterable[str]
    ) -> str:
        """Returns the drawing with ``lines``, which take ``width`` and ``height`` below the title."""
        width, height = 2 * _MARGIN + max(width, 480.0), 2 * _MARGIN + 2 * _LABEL + height
        lines = [
            f'<svg {attributes}xmlns="http://www.w3.org/2000/svg" '
            f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
            style,
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
            _text(_MARGIN, _MARGIN + _LABEL, title, "title"),
            *lines,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _boxes(self, indices: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Box]:
        """Yields the rectangles that ``indices``, by dim, make of the drawn dims."""
        extents: list[list[tuple[float, float]]] = [[(0.0, 1.0)], [(0.0, 1.0)]]
        for place, dim in enumerate(reversed(self._dims)):
            size = self._shape[dim]
            extents[1 - place] = [(begin / size, length / size) for begin, length in indices[dim]]
        for (y, height), (x, width) in product(*extents):
            yield x, y, width, height

    def _cell(self, left: float, top: float, boxes: Iterable[tuple[Box, str]], label: str) -> Iterator[str]:
        """Yields the lines of a rank with ``boxes``, each with what fills it."""
        yield '<g class="rank">'
        yield _rectangle(left, top, self._width, self._height, 'class="whole"')
        for (x, y, width, height), fill in boxes:
            yield _rectangle(
                left + x * self._width,
                top + y * self._height,
                width * self._width,
                height * self._height,
                f'class="block" fill="{fill}"',
            )
        yield _text(left, top + self._height + _LABEL - 3, label, "label")
        yield "</g>"


class _PlanDrawing(_Drawing):
    def __init__(self, plan: Plan, ranks: Sequence[int] | None) -> None:
        self._plan = plan
        self._ranks = range(num_ranks(plan)) if ranks is None else ranks
        self._coordinates = list(coordinates(plan, MOST_RANKS))
        self._columns = plan.mesh.sizes[-1]
        super().__init__(plan.shape, _drawn_dims(plan, self._coordinates))
        self._column_step = max(self._width, _CELL) + _GAP
        self._row_step = self._height + _LABEL + _GAP

    def svg(self) -> str:
        panel_height = len(self._coordinates) // self._columns * self._row_step + 2 * _LABEL
        num_panels = len(self._plan.steps) + 1
        # Each rule names the drawing's class, since a page's other drawings see the rules, too.
        style = "".join(f".funcol-plan {rule}" for rule in _STYLE)
        lines = (
            line
            for panel in range(num_panels)
            for line in self._panel(panel, _MARGIN + 2 * _LABEL + panel * panel_height)
        )
        return self._document(
            'class="funcol-plan" ',
            f"<style>{style}</style><defs>{_PARTIAL_PATTERN}</defs>",
            self._columns * self._column_step,
            num_panels * panel_height,
            self._title(),
            lines,
        )

    def _title(self) -> str:
        ends = f"{self._plan.src} -> {self._plan.dst}" if self._plan.steps else self._plan.src
        title = f"{ends}, tensor of shape {tuple(self._shape)}"
        if len(self._shape) > 2:
            title += f", drawn: dims {' and '.join(map(str, self._dims))}"
        return title

    def _panel(self, num_steps: int, top: float) -> Iterator[str]:
        layout = layouts(self._plan)[num_steps]
        what = "source" if num_steps == 0 else f"{num_steps}. {self._plan.steps[num_steps - 1]}"
        if not self._plan.steps:
            what = "layout"
        names = axis_names(self._plan.mesh)
        yield '<g class="panel">'
        yield _text(_MARGIN, top + _LABEL, f"{what}: {layout}", "step")
        for place, coordinate in enumerate(self._coordinates):
            where = " ".join(f"{name}{index}" for name, index in zip(names, coordinate, strict=True))
            fills = [_color(place, len(self._coordinates))]
            if "P(" in layout:
                fills.append("url(#partial)")
            held = self._plan.local_indices(num_steps, list(coordinate))
            # The rank holds nothing if the interval list of any dim, drawn or not, is empty.
            boxes = product(self._boxes(held) if all(held) else (), fills)
            left = _MARGIN + place % self._columns * self._column_step
            cell_top = top + 2 * _LABEL + place // self._columns * self._row_step
            yield from self._cell(left, cell_top, boxes, f"{self._ranks[place]}: {where}")
        yield "</g>"


def _drawn_dims(plan: Plan, coordinates: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns up to two dims in ascending order, preferring the sharded dims, then the last ones."""
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


class _MeshChangeDrawing(_Drawing):
    def __init__(self, change: MeshChange) -> None:
        super().__init__(change.shape, range(len(change.shape))[-2:])
        self._change = change
        self._colors = {rank: _color(place, len(change.ranks)) for place, rank in enumerate(change.ranks)}
        # Of the plan without collectives: it has the holders of each block, whichever way the plan goes.
        self._transfer = change.transfer if change.bound is None else change.as_transfer()

    def svg(self) -> str:
        change = self._change
        num_cells = max(len(change.src_ranks), len(change.dst_ranks))
        panel_height = self._height + 3 * _LABEL + _GAP
        matrix_size = (len(change.ranks) + 1) * _SQUARE
        top = _MARGIN + 2 * _LABEL
        lines = (
            *self._panel(f"source: {change.src}", change.src_ranks, self._source_boxes(), top),
            *self._panel(f"target: {change.dst}", change.dst_ranks, self._target_boxes(), top + panel_height),
            *self._matrix(top + 2 * panel_height),
        )
        return self._document(
            "",
            f"<style>{''.join(_STYLE)}.bytes{{font-size:9px}}</style>",
            max(num_cells * (self._width + _GAP), matrix_size),
            2 * panel_height + 2 * _LABEL + matrix_size,
            f"{change}, tensor of shape {tuple(change.shape)}",
            lines,
        )

    def _source_boxes(self) -> dict[int, list[tuple[Box, str]]]:
        """Returns boxes and their colors, by rank."""
        if self._transfer is None:
            return {}
        return {
            rank: [(box, self._colors[rank]) for box in self._boxes(self._transfer.held(rank) or ())]
            for rank in self._change.src_ranks
        }

    def _target_boxes(self) -> dict[int, list[tuple[Box, str]]]:
        wanted: dict[int, list[tuple[Box, str]]] = {}
        transfer = self._transfer
        if transfer is None:
            return wanted
        for message in (*transfer.messages, *transfer.kept):
            numel = math.prod(sum(size for _, size in of_dim) for of_dim in message.indices)
            begin, size = message.begin / numel, message.size / numel
            for x, y, width, height in self._boxes(message.indices):
                # A part of a box is drawn as rows of it.
                part = (x, y + begin * height, width, size * height)
                wanted.setdefault(message.receiver, []).append((part, self._colors[message.sender]))
        return wanted

    def _panel(
        self, title: str, ranks: tuple[int, ...], boxes: dict[int, list[tuple[Box, str]]], top: float
    ) -> Iterator[str]:
        yield '<g class="panel">'
        yield _text(_MARGIN, top + _LABEL, title, "step")
        for place, rank in enumerate(ranks):
            left = _MARGIN + place * (self._width + _GAP)
            yield from self._cell(left, top + 2 * _LABEL, boxes.get(rank, ()), str(rank))
        yield "</g>"

    def _matrix(self, top: float) -> Iterator[str]:
        change = self._change
        most = max((count for row in change.bytes for count in row), default=0)
        yield '<g class="matrix">'
        yield _text(_MARGIN, top + _LABEL, "bytes that the rank of a line sends to that of a column", "step")
        top += 2 * _LABEL
        for place, rank in enumerate(change.ranks):
            yield _text(_MARGIN + (place + 1.3) * _SQUARE, top + _LABEL, str(rank), "label")
            yield _text(_MARGIN, top + (place + 1.0) * _SQUARE, str(rank), "label")
        for line, row in enumerate(change.bytes):
            for column, count in enumerate(row):
                left, upper = _MARGIN + (column + 1) * _SQUARE, top + (line + 0.5) * _SQUARE
                share = count / most if most else 0.0
                yield _rectangle(
                    left,
                    upper,
                    _SQUARE,
                    _SQUARE,
                    f'class="sent" stroke="#ccc" fill="hsl(210,70%,{100 - 50 * share:.0f}%)"',
                )
                if count:
                    yield _text(left + 2, upper + _SQUARE / 2 + 3, f"{count:.3g}", "bytes")
        yield "</g>"


def _rectangle(x: float, y: float, width: float, height: float, attributes: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {attributes}/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


def _color(place: int, count: int) -> str:
    return f"hsl({360 * place / count:.0f},60%,55%)"
