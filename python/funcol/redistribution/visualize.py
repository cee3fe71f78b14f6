""":func:`show`: which rank holds which block of a tensor, as a table in colors or as a drawing."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import cycle
from typing import Any, TextIO

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .plan_drawing import MOST_RANKS, plan_as_html
from .plan_tables import Rows, aligned, block_counts, check_pieces, described_tensor, holding_rows, num_ranks
from .planning import MeshLike, PlacementsLike, Plan, plan_redistribution
from .specs import meta_of

# Light backgrounds of the 256 colors that terminals have, for black text.
_COLORS = (153, 216, 151, 222, 183, 217, 159, 229, 146, 187, 181, 152)


def show(
    what: DTensor | DTensorSpec | Plan | PlacementsLike,
    mesh: MeshLike | None = None,
    shape: Sequence[int] | None = None,
    *,
    file: TextIO | None = None,
) -> None:
    """Shows which block of a tensor each rank holds: of a DTensor, of a layout, or after each step of a plan.

    ``what`` is a ``DTensor``, a ``DTensorSpec``, a :class:`~funcol.redistribution.Plan`, or the placements of
    a tensor of ``shape`` on ``mesh``, written as for :func:`funcol.plan_redistribution`. Values are not read
    and nothing is sent, so one rank may call it alone.

    Prints a table with a row for each rank to ``file`` (default: the standard output): at most 64 rows. For
    more ranks, up to 16384, it also prints how many different blocks each layout has, and how many ranks hold
    each of them. Equal blocks in a column have the same color. There are no colors if the output is not a
    terminal, or if the environment has ``NO_COLOR``. In a notebook it shows the drawing that
    ``python -m funcol plan --svg`` makes.

    Raises ``TypeError`` for other objects, and for placements without ``mesh`` and ``shape``;
    ``NotImplementedError`` for placements of unknown kinds; ``ValueError`` for strided shards of more than
    1024 pieces.

    PyTorch counterpart: ``torch.distributed.tensor.debug.visualize_sharding``.
    """
    plan, ranks = _plan_of(what, mesh, shape)
    check_pieces(plan)
    display = _display_of_notebook() if file is None else None
    if display is not None:
        text = "\n".join(_lines(plan, ranks, in_color=False))
        display({"text/html": plan_as_html(plan, ranks), "text/plain": text}, raw=True)
        return
    out = file or sys.stdout
    print("\n".join(_lines(plan, ranks, in_color=out.isatty() and not os.environ.get("NO_COLOR"))), file=out)


def _plan_of(
    what: Any, mesh: MeshLike | None, shape: Sequence[int] | None
) -> tuple[Plan, Sequence[int] | None]:
    """Returns a plan with the layouts to show, without steps for one layout, and its ranks, if known."""
    spec = what._spec if isinstance(what, DTensor) else what
    if isinstance(spec, Plan | DTensorSpec) and not (mesh is None and shape is None):
        raise TypeError(f"funcol.show: a {type(what).__name__} has a mesh and a shape: pass it alone.")
    if isinstance(spec, Plan):
        return spec, None
    placements: PlacementsLike
    order = None
    if isinstance(spec, DTensorSpec):
        mesh, shape, placements, order = spec.mesh, meta_of(spec).shape, spec.placements, spec.shard_order
    elif isinstance(spec, str | Sequence) and mesh is not None and shape is not None:
        placements = spec
    else:
        raise TypeError(
            f"funcol.show: got a {type(what).__name__}, expected a DTensor, a DTensorSpec, a Plan, or "
            'placements with a mesh and a shape: show("S0,R", "dp=2,tp=4", (64, 128)).'
        )
    plan = plan_redistribution(
        placements, placements, mesh, shape, "uint8", src_shard_order=order, dst_shard_order=order
    )
    return plan, mesh.mesh.flatten().tolist() if isinstance(mesh, DeviceMesh) else None


def _display_of_notebook() -> Any:
    """Returns IPython's display function if this process is the kernel of a notebook, else None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return sys.modules["IPython.display"].display if hasattr(shell, "kernel") else None


def _lines(plan: Plan, ranks: Sequence[int] | None, in_color: bool) -> list[str]:
    rows = holding_rows(plan, ranks, MOST_RANKS)
    lines = aligned(rows, num_left=len(rows[0]))
    if in_color:
        lines[2:] = _color_blocks(rows, first=len(plan.mesh.sizes) + 1)
    title = f"{plan}, {described_tensor(plan)}" if plan.steps else f"{plan.src}, {described_tensor(plan)}"
    if hint := plan.hint:
        lines.append(hint)
    more = num_ranks(plan) - MOST_RANKS
    return [title, *lines, *([f"... and {more} ranks more", *block_counts(plan)] if more > 0 else [])]


def _color_blocks(rows: Rows, first: int) -> list[str]:
    """Returns the lines below the header, with one color for equal blocks of a column from ``first`` on."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    colors = [dict(zip(dict.fromkeys(column[2:]), cycle(_COLORS), strict=False)) for column in columns]
    lines = []
    for row in rows[2:]:
        cells = [f"{text:<{width}}" for text, width in zip(row, widths, strict=True)]
        for column in range(first, len(cells)):
            color = colors[column][row[column]]
            cells[column] = f"\x1b[38;5;16;48;5;{color}m{cells[column]}\x1b[0m"
        lines.append("  ".join(cells))
    return lines
