"""``python -m funcol plan``: the steps of a redistribution as a table, beside PyTorch's greedy plan."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import _C
from ..redistribution.cost_models import AlphaBeta, CostModel, StepCounts, axis_names, listed_axes
from ..redistribution.plan_drawing import mesh_change_as_svg, plan_as_svg
from ..redistribution.plan_tables import Rows, aligned, bytes_text, described_tensor, num_pieces, step_rows
from ..redistribution.planning import (
    MeshChange,
    Plan,
    greedy_redistribution,
    mesh_of,
    plan_mesh_change,
    plan_redistribution,
)
from ..redistribution.texts import bytes_of, one_line, quoted, rank_numbers, rank_text, shape_of
from .arguments import argument_read_by, writing

MOST_RANKS = 4096
"""Ranks of a mesh in a plan between meshes."""

MOST_PAIRS = 1 << 20
"""Pairs of a block that a rank of the source holds and one that a rank of the target wants: 1024 ranks each.
A strided shard counts as many blocks as it has pieces."""

MOST_COLUMNS = 64
"""Ranks that have a line and a column in the matrix of bytes."""


def add_to(commands: Any) -> None:
    """Adds the command to argparse's ``commands``."""
    command = commands.add_parser(
        "plan",
        help="the steps of least cost from one layout of a tensor to another",
        description="Prints the steps of least cost that turn SRC into DST, and PyTorch's greedy plan; with "
        "--to-mesh, who sends how many bytes to whom. Needs no process group.",
        epilog="examples: python -m funcol plan --mesh dp=2,tp=4 --shape 1024x4096 S0,R R,S1; "
        'python -m funcol plan --mesh 2,4 --shape 64,128 "Shard(0),Replicate()" "Replicate(),Shard(1)"; '
        "python -m funcol plan --mesh dp=4 --to-mesh tp=2 --to-ranks 4-5 --shape 4096x4096 S0 S1",
    )
    command.add_argument(
        "src",
        metavar="SRC",
        help='a placement for each mesh axis: "S0,R", "P(max),_S(0, 2)", "Shard(0),Replicate()"',
    )
    command.add_argument("dst", metavar="DST")
    command.add_argument("--mesh", required=True, metavar="NAME=RANKS,...", help="the axes: dp=2,tp=4 or 2,4")
    command.add_argument(
        "--to-mesh", metavar="NAME=RANKS,...", help="the axes of another mesh, on which DST is"
    )
    command.add_argument(
        "--ranks",
        type=argument_read_by(_ranks),
        metavar="FIRST-LAST,...",
        help="of --mesh in the world (default: from 0 on)",
    )
    command.add_argument(
        "--to-ranks",
        type=argument_read_by(_ranks),
        metavar="FIRST-LAST,...",
        help="those of --to-mesh: 8-11,16",
    )
    command.add_argument(
        "--shape",
        required=True,
        type=argument_read_by(shape_of),
        metavar="NxM",
        help="of the whole tensor: 1024x4096 or 1024,4096",
    )
    command.add_argument("--dtype", default="float32", help="of the tensor (default: float32)")
    command.add_argument(
        "--cost-model",
        metavar="FILE|step-counts",
        help="what `python -m funcol calibrate` wrote, or step-counts",
    )
    command.add_argument(
        "--max-bytes",
        type=argument_read_by(bytes_of),
        help="the most memory that a rank may hold at any time",
    )
    command.add_argument(
        "--src-order", metavar="DIM:AXIS,...", help='axes that cut a dim, first cut first: "0:tp,dp"'
    )
    command.add_argument("--dst-order", metavar="DIM:AXIS,...")
    command.add_argument("--svg", type=Path, metavar="FILE", help="draw what each rank holds after each step")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    cost_model = _cost_model(arguments.cost_model)
    if arguments.to_mesh is not None:
        _run_between_meshes(arguments, cost_model)
        return
    if arguments.ranks is not None or arguments.to_ranks is not None:
        raise ValueError("--ranks and --to-ranks are for plans between meshes. Give --to-mesh, too.")
    common: dict[str, Any] = {
        "src": arguments.src,
        "dst": arguments.dst,
        "mesh": arguments.mesh,
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "src_shard_order": arguments.src_order,
        "dst_shard_order": arguments.dst_order,
        "cost_model": cost_model,
    }
    unit = "" if isinstance(cost_model, StepCounts) else "us"
    plan = plan_redistribution(**common, max_bytes=arguments.max_bytes)
    drawing = None if arguments.svg is None else plan_as_svg(plan)
    print(f"{_title(plan, arguments.dtype)}\n\nleast cost: {plan}\n{plan_as_table(plan, unit)}\n")
    if hint := plan.hint:
        print(f"{hint}\n")
    try:
        greedy = greedy_redistribution(**common)
    except ValueError as error:
        print(f"PyTorch's greedy plan: none. {error}")
    else:
        print(f"PyTorch's greedy plan: {greedy}\n{plan_as_table(greedy, unit)}")
        print(f"\n{comparison(plan, greedy)}")
    _write(drawing, arguments.svg)


def comparison(plan: Plan, greedy: Plan) -> str:
    """Returns a line: how many times fewer bytes ``plan`` sends than ``greedy``, and less memory it takes."""
    sent, sent_by_greedy = (sum(step.bytes_sent for step in one.steps) for one in (plan, greedy))
    bytes_ = _times(sent, sent_by_greedy, ("fewer bytes", "as many bytes", "more bytes"))
    memory = _times(plan.peak_bytes, greedy.peak_bytes, ("less memory", "as much memory", "more memory"))
    return f"Beside PyTorch's plan, that of least cost sends {bytes_} and takes {memory}."


def _times(ours: int, theirs: int, words: tuple[str, str, str]) -> str:
    less, same, more = words
    if ours == theirs:
        return same
    if min(ours, theirs) == 0:
        return f"{bytes_text(abs(ours - theirs))} {less if ours < theirs else more}"
    return f"{theirs / ours:.3g}x {less}" if ours < theirs else f"{ours / theirs:.3g}x {more}"


def _write(drawing: str | None, path: Path) -> None:
    if drawing is not None:
        with writing(path):
            path.write_text(drawing, encoding="utf-8")
        print(f"\ndrawn in {one_line(str(path))}")


def _run_between_meshes(arguments: argparse.Namespace, cost_model: CostModel | None) -> None:
    _check_size(arguments)
    change = plan_mesh_change(
        arguments.src,
        arguments.dst,
        arguments.mesh,
        arguments.to_mesh,
        arguments.shape,
        arguments.dtype,
        ranks=arguments.ranks,
        to_ranks=arguments.to_ranks,
        src_shard_order=arguments.src_order,
        dst_shard_order=arguments.dst_order,
        cost_model=cost_model,
        max_bytes=arguments.max_bytes,
    )
    drawing = None if arguments.svg is None else mesh_change_as_svg(change)
    shape = "x".join(map(str, change.shape)) or "scalar"
    print(
        f"{shape} {arguments.dtype.removeprefix('torch.')} "
        f"from {_mesh_text(change.src_mesh, change.src_ranks)} "
        f"to {_mesh_text(change.dst_mesh, change.dst_ranks)}\n\nleast cost: {change}"
    )
    unit = "" if isinstance(cost_model, StepCounts) else "us"
    if change.before is not None and change.before.steps:
        print(plan_as_table(change.before, unit))
    if (transfer := change.transfer) is not None:
        print(
            f"  transfer {transfer.src} => {transfer.dst}: {len(transfer.messages)} "
            f"messages, busiest sender {bytes_text(transfer.busiest_sender)}, least possible "
            f"{bytes_text(transfer.bound)}"
        )
    if change.after is not None:
        print(plan_as_table(change.after, unit))
    print(f"  cost {change.cost:.4g}{' ' + unit if unit else ''}, peak {bytes_text(change.peak_bytes)}\n")
    print(bytes_as_table(change))
    _write(drawing, arguments.svg)


def _check_size(arguments: argparse.Namespace) -> None:
    """Raises ``ValueError`` for meshes between which a plan takes more than a few seconds."""
    sides = (
        (arguments.mesh, arguments.src, arguments.src_order),
        (arguments.to_mesh, arguments.dst, arguments.dst_order),
    )
    num_pairs = 1
    for mesh, placements, order in sides:
        num_ranks = math.prod(mesh_of(mesh).sizes)
        if num_ranks > MOST_RANKS:
            raise ValueError(
                f"the mesh {quoted(mesh)} has {num_ranks} ranks; plans between meshes are printed for "
                f"{MOST_RANKS} at most. Plan for a smaller mesh of the same axes."
            )
        layout = plan_redistribution(
            placements,
            placements,
            mesh,
            arguments.shape,
            arguments.dtype,
            src_shard_order=order,
            dst_shard_order=order,
        )
        num_pairs *= num_ranks * num_pieces(layout)
    if num_pairs > MOST_PAIRS:
        raise ValueError(
            f"{num_pairs} pairs of blocks, of the ranks of {quoted(arguments.mesh)} and those of "
            f"{quoted(arguments.to_mesh)}, take too long to plan; the most is {MOST_PAIRS}. Plan for smaller "
            "meshes of the same axes, or with smaller split factors."
        )


def bytes_as_table(change: MeshChange) -> str:
    """Returns what the ranks send to each other, and what the busiest one sends: as a matrix, or of more than
    :data:`MOST_COLUMNS` ranks as a summary."""
    matrix = change.bytes
    sent = [sum(row) for row in matrix]
    table = _matrix if len(sent) <= MOST_COLUMNS else _summary
    busiest = max(range(len(sent)), key=sent.__getitem__)
    bound = change.bound
    least = "" if bound is None else f"; no plan has one that sends less than {bytes_text(bound)}"
    return (
        f"{table(change.ranks, matrix, sent)}\n\n"
        f"busiest: rank {change.ranks[busiest]}, which sends {bytes_text(sent[busiest])}{least}"
    )


def _matrix(ranks: Sequence[int], matrix: Sequence[Sequence[int]], sent: Sequence[int]) -> str:
    """Returns a table with a line for each rank that sends and a column for each that receives."""
    rows: Rows = [
        ("from / to", *map(str, ranks), "sent"),
        *(
            (str(rank), *(bytes_text(count) if count else "-" for count in row), bytes_text(total))
            for rank, row, total in zip(ranks, matrix, sent, strict=True)
        ),
        (
            "received",
            *(bytes_text(sum(column)) for column in zip(*matrix, strict=True)),
            bytes_text(sum(sent)),
        ),
    ]
    return "\n".join(f"  {line}" for line in aligned(rows, num_left=0))


def _summary(ranks: Sequence[int], matrix: Sequence[Sequence[int]], sent: Sequence[int]) -> str:
    """Returns how many ranks send and receive, and the least, the most and all of their bytes."""
    received = [sum(column) for column in zip(*matrix, strict=True)]
    rows: Rows = [("", "ranks", "least", "most", "total")]
    for what, bytes_ in (("send", sent), ("receive", received)):
        moved = [count for count in bytes_ if count]
        sizes = (min(moved, default=0), max(moved, default=0), sum(moved))
        rows.append((what, f"{len(moved)} of {len(ranks)}", *map(bytes_text, sizes)))
    num_pairs = sum(len(row) - row.count(0) for row in matrix)
    lines = [f"  {line}" for line in aligned(rows, num_left=1)]
    return "\n".join([*lines, f"  {num_pairs} pairs of a rank that sends and one that receives"])


def _mesh_text(mesh: _C.Mesh, ranks: tuple[int, ...]) -> str:
    axes = dict(zip(axis_names(mesh), mesh.sizes, strict=True))
    return f"{listed_axes(axes)} (ranks {rank_text(ranks, MOST_COLUMNS)})"


def plan_as_table(plan: Plan, unit: str) -> str:
    """Returns a line per step and one of totals; bytes are those of the rank that sends or holds most."""
    return "\n".join(f"  {line}" for line in aligned(step_rows(plan, unit), num_left=3))


def _title(plan: Plan, dtype: str) -> str:
    shape, _, mesh = described_tensor(plan).partition(" on ")
    return f"{shape} {dtype.removeprefix('torch.')} on {mesh}"


def _ranks(text: str) -> list[int]:
    return rank_numbers(text, MOST_RANKS)


def _cost_model(text: str | None) -> CostModel | None:
    if text is None:
        return None
    return StepCounts() if text == "step-counts" else AlphaBeta.load(text)
