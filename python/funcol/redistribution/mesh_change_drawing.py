"""A plan between meshes drawn as SVG: what each rank holds before and after, and from whom it has that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from xml.sax.saxutils import escape

from .mesh_changes import MeshChange

MOST_RANKS = 64

_CELL = 96.0  # the longer side of a tensor, in pixels
_THINNEST = 18.0
_GAP = 14.0
_LABEL = 15.0
_MARGIN = 16.0
_SQUARE = 34.0  # of the matrix of bytes
_STYLE = (
    "text{font-family:sans-serif;font-size:11px;fill:#222}.title{font-size:14px;font-weight:bold}"
    ".step{font-size:13px}.whole{fill:#fff;stroke:#999}.bytes{font-size:9px}"
)

Box = tuple[float, float, float, float]  # x, y, width, height, as parts of the whole tensor


def mesh_change_as_svg(change: MeshChange) -> str:
    """A row of ranks for the source mesh, one for the target mesh, and the matrix of bytes.

    A cell is the whole tensor in outline. What a rank of the source holds is filled with the rank's colour;
    what a rank of the target wants, with the colours of the ranks that it comes from, its own for what it
    keeps. The last two dims are drawn. Where values are partial, each rank has the colours of its own.
    ``ValueError`` for more than :data:`MOST_RANKS` ranks.
    """
    if len(change.ranks) > MOST_RANKS:
        raise ValueError(
            f"funcol: a drawing of {len(change.ranks)} ranks cannot be read; the most is {MOST_RANKS}."
        )
    return _Drawing(change).svg()


class _Drawing:
    def __init__(self, change: MeshChange) -> None:
        self._change = change
        self._colours = {
            rank: f"hsl({360 * place / len(change.ranks):.0f},60%,55%)"
            for place, rank in enumerate(change.ranks)
        }
        rows, columns = (1, *change.shape)[-2:] if change.shape else (1, 1)
        longer = max(rows, columns, 1)
        self._height = max(_CELL * rows / longer, _THINNEST)
        self._width = max(_CELL * columns / longer, _THINNEST)
        # Of the plan without collectives: who has what, whichever way it goes.
        self._transfer = change.transfer if change.bound is None else change.as_transfer()

    def svg(self) -> str:
        change = self._change
        num_cells = max(len(change.src_ranks), len(change.dst_ranks))
        panel_height = self._height + 3 * _LABEL + _GAP
        matrix_size = (len(change.ranks) + 1) * _SQUARE
        width = 2 * _MARGIN + max(num_cells * (self._width + _GAP), matrix_size, 480.0)
        height = 2 * _MARGIN + 2 * _LABEL + 2 * panel_height + 2 * _LABEL + matrix_size
        top = _MARGIN + 2 * _LABEL
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{width:.0f}" height="{height:.0f}" fill="#fff"/>',
            _text(_MARGIN, _MARGIN + _LABEL, f"{change}, tensor of shape {tuple(change.shape)}", "title"),
            *self._panel(f"source: {change.src}", change.src_ranks, self._held(), top),
            *self._panel(f"target: {change.dst}", change.dst_ranks, self._wanted(), top + panel_height),
            *self._matrix(top + 2 * panel_height),
        ]
        return "\n".join([*lines, "</svg>"]) + "\n"

    def _held(self) -> dict[int, list[tuple[Box, int]]]:
        """By rank, boxes and the rank that gives them their colour."""
        if self._transfer is None:
            return {}
        return {
            rank: [(box, rank) for box in self._boxes(self._transfer.held(rank) or ())]
            for rank in self._change.src_ranks
        }

    def _wanted(self) -> dict[int, list[tuple[Box, int]]]:
        wanted: dict[int, list[tuple[Box, int]]] = {}
        transfer = self._transfer
        if transfer is None:
            return wanted
        for message in (*transfer.messages, *transfer.kept):
            numel = math.prod(sum(size for _, size in of_dim) for of_dim in message.indices)
            begin, size = message.begin / numel, message.size / numel
            for x, y, width, height in self._boxes(message.indices):
                # A part of a box is drawn as rows of it.
                part = (x, y + begin * height, width, size * height)
                wanted.setdefault(message.receiver, []).append((part, message.sender))
        return wanted

    def _boxes(self, indices: tuple[tuple[tuple[int, int], ...], ...]) -> Iterator[Box]:
        extents: list[list[tuple[float, float]]] = [[(0.0, 1.0)], [(0.0, 1.0)]]
        for place, dim in enumerate(reversed(range(len(self._change.shape))[-2:])):
            size = self._change.shape[dim]
            extents[1 - place] = [(begin / size, length / size) for begin, length in indices[dim]]
        for (y, height), (x, width) in product(*extents):
            yield x, y, width, height

    def _panel(
        self, title: str, ranks: tuple[int, ...], boxes: dict[int, list[tuple[Box, int]]], top: float
    ) -> Iterator[str]:
        yield '<g class="panel">'
        yield _text(_MARGIN, top + _LABEL, title, "step")
        for place, rank in enumerate(ranks):
            left = _MARGIN + place * (self._width + _GAP)
            cell_top = top + 2 * _LABEL
            yield '<g class="rank">'
            yield _rectangle(left, cell_top, self._width, self._height, 'class="whole"')
            for (x, y, width, height), owner in boxes.get(rank, ()):
                yield _rectangle(
                    left + x * self._width,
                    cell_top + y * self._height,
                    width * self._width,
                    height * self._height,
                    f'class="block" fill="{self._colours[owner]}"',
                )
            yield _text(left, cell_top + self._height + _LABEL - 3, str(rank), "label")
            yield "</g>"
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
