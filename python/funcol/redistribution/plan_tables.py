"""Plans as rows of text: their steps, and which block of the tensor each rank holds after each of them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from .cost_models import axis_names, listed_axes
from .planning import Plan

Rows = list[tuple[str, ...]]

MOST_COUNTED = 1 << 14
"""Ranks of a mesh whose blocks are compared."""

MOST_PIECES = 1024
"""Pieces of a block that are shown; strided shards have as many as their split factor says."""

_STRIDED = re.compile(r"_S\((\d+), (\d+)\)")


def step_rows(plan: Plan, unit: str = "") -> Rows:
    """Returns a header, a row for each step, and a row of totals. Bytes are those of the rank that sends or
    holds most; ``unit`` is the unit of the costs."""
    header = ("step", "before", "after", "sent a rank", f"cost, {unit}" if unit else "cost", "peak")
    parts = [
        (str(step), step.before, step.after, step.bytes_sent, step.cost, step.peak_bytes)
        for step in plan.steps
    ]
    total_sent = sum(step.bytes_sent for step in plan.steps)
    parts.append(("total", plan.src, plan.dst, total_sent, plan.cost, plan.peak_bytes))
    rows = [
        (what, before, after, bytes_text(sent), f"{cost:.4g}", bytes_text(peak))
        for what, before, after, sent, cost, peak in parts
    ]
    return [header, *rows]


def aligned(rows: Rows, num_left: int) -> list[str]:
    """Returns a line for each row, with aligned columns: the first ``num_left`` to the left, others right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            f"{text:<{width}}" if column < num_left else f"{text:>{width}}"
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def described_tensor(plan: Plan) -> str:
    """Returns the shape and the mesh of ``plan``: ``64x128 on dp=2, tp=4``."""
    axes = dict(zip(axis_names(plan.mesh), plan.mesh.sizes, strict=True))
    return f"{'x'.join(map(str, plan.shape)) or 'scalar'} on {listed_axes(axes)}"


def layouts(plan: Plan) -> list[str]:
    """Returns the initial layout of ``plan`` and the layout after each step."""
    return [plan.src, *(step.after for step in plan.steps)]


def block(plan: Plan, num_steps: int, coordinate: Sequence[int]) -> str:
    """Returns the block of the rank at ``coordinate`` of the mesh after ``num_steps`` steps, as an index:
    ``[0:32, :]``.

    ``:`` is a full dim, ``0:2+4:6`` two pieces of a dim, ``nothing`` an empty block. ``part of`` precedes a
    block that is still to be reduced.
    """
    held = plan.local_indices(num_steps, list(coordinate))
    if not all(held):
        return "nothing"
    dims = [
        ":" if pieces == ((0, size),) else "+".join(f"{begin}:{begin + length}" for begin, length in pieces)
        for pieces, size in zip(held, plan.shape, strict=True)
    ]
    index = f"[{', '.join(dims)}]" if dims else "the value"
    return f"part of {index}" if "P(" in layouts(plan)[num_steps] else index


def holding_rows(plan: Plan, ranks: Sequence[int] | None, most_ranks: int) -> Rows:
    """Returns two header rows, then a row for each of the first ``most_ranks`` ranks: its number, its
    coordinate, and its block at first and after each step.

    ``ranks`` are the numbers of the ranks in the order of the mesh (default: 0, 1, 2, ...).
    """
    names = axis_names(plan.mesh)
    num_panels = len(plan.steps) + 1
    rows: Rows = [
        ("rank", *names, *(["holds"] if num_panels == 1 else ["at first", *map(str, plan.steps)])),
        ("", *[""] * len(names), *layouts(plan)),
    ]
    for place, coordinate in enumerate(coordinates(plan, most_ranks)):
        rank = place if ranks is None else ranks[place]
        held = (block(plan, num_steps, coordinate) for num_steps in range(num_panels))
        rows.append((str(rank), *map(str, coordinate), *held))
    return rows


def coordinates(plan: Plan, most_ranks: int) -> Iterator[tuple[int, ...]]:
    """Yields the coordinates of the first ``most_ranks`` ranks of ``plan.mesh``, the last axis first."""
    for place in range(min(num_ranks(plan), most_ranks)):
        coordinate: list[int] = []
        for size in reversed(plan.mesh.sizes):
            place, index = divmod(place, size)
            coordinate.insert(0, index)
        yield tuple(coordinate)


def block_counts(plan: Plan) -> list[str]:
    """Returns a line for each layout of ``plan``: the number of different blocks and of the ranks of each."""
    if num_ranks(plan) > MOST_COUNTED:
        return [f"no count of different blocks: there are more than {MOST_COUNTED} ranks"]
    return [f"{layout}: {_block_count_text(plan, step)}" for step, layout in enumerate(layouts(plan))]


def _block_count_text(plan: Plan, num_steps: int) -> str:
    held = Counter(block(plan, num_steps, at) for at in coordinates(plan, MOST_COUNTED))
    without = held.pop("nothing", 0)
    least, most = min(held.values(), default=0), max(held.values(), default=0)
    each = _count_text(least, "rank") if least == most else f"{least} to {most} ranks"
    nothing = f"; {_count_text(without, 'rank')} without any" if without else ""
    return f"{_count_text(len(held), 'different block')}, each on {each}{nothing}"


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def num_pieces(plan: Plan) -> int:
    """Returns a bound on the pieces of a block in any layout of ``plan``: 1 without strided shards."""

    def bound(layout: str) -> int:
        strided = ((int(dim), int(factor)) for dim, factor in _STRIDED.findall(layout))
        return math.prod(max(min(factor, plan.shape[dim]), 1) for dim, factor in strided)

    return max(map(bound, layouts(plan)))


def check_pieces(plan: Plan) -> None:
    """Raises ValueError if blocks of ``plan`` may have more than :data:`MOST_PIECES` pieces."""
    if num_pieces(plan) > MOST_PIECES:
        raise ValueError(
            f"funcol: ranks hold blocks of up to {num_pieces(plan)} pieces, which cannot be shown; the most "
            f"is {MOST_PIECES}. Use smaller split factors."
        )


def num_ranks(plan: Plan) -> int:
    return math.prod(plan.mesh.sizes)


def bytes_text(count: int) -> str:
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.1f} {' KMGT'[power]}iB"
