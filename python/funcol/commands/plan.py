"""``python -m funcol plan``: the steps of a redistribution as a table, beside PyTorch's greedy plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import _C
from ..redistribution.cost_models import AlphaBeta, CostModel, StepCounts, axis_names
from ..redistribution.mesh_change_drawing import mesh_change_as_svg
from ..redistribution.mesh_changes import MeshChange, plan_mesh_change
from ..redistribution.plan_drawing import plan_as_svg
from ..redistribution.plan_tables import aligned, bytes_text, described_tensor, step_rows
from ..redistribution.planning import Plan, greedy_redistribution, plan_redistribution


def add_to(commands: Any) -> None:
    """Adds the command to argparse's ``commands``."""
    command = commands.add_parser(
        "plan",
        help="the steps of least cost from one layout of a tensor to another",
        description="Prints the steps of least cost that turn SRC into DST, and PyTorch's greedy plan; with "
        "--to-mesh, who sends how many bytes to whom. Needs no process group.",
        epilog="examples: python -m funcol plan --mesh dp=2,tp=4 --shape 1024x4096 S0,R R,S1; "
        "python -m funcol plan --mesh dp=4 --to-mesh tp=2 --to-ranks 4-5 --shape 4096x4096 S0 S1",
    )
    command.add_argument(
        "src", metavar="SRC", help='a placement for each mesh axis: "S0,R", "P(max),_S(0, 2)"'
    )
    command.add_argument("dst", metavar="DST")
    command.add_argument("--mesh", required=True, metavar="NAME=RANKS,...", help="the axes: dp=2,tp=4")
    command.add_argument(
        "--to-mesh", metavar="NAME=RANKS,...", help="the axes of another mesh, on which DST is"
    )
    command.add_argument(
        "--ranks", type=_ranks, metavar="FIRST-LAST,...", help="of --mesh in the world (default: from 0 on)"
    )
    command.add_argument(
        "--to-ranks", type=_ranks, metavar="FIRST-LAST,...", help="those of --to-mesh: 8-11,16"
    )
    command.add_argument(
        "--shape", required=True, type=_shape, metavar="NxM", help="of the whole tensor: 1024x4096"
    )
    command.add_argument("--dtype", default="float32", help="of the tensor (default: float32)")
    command.add_argument(
        "--cost-model",
        metavar="FILE|step-counts",
        help="what `python -m funcol calibrate` wrote, or step-counts",
    )
    command.add_argument("--max-bytes", type=int, help="the most memory that a rank may hold at any time")
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
    print(f"{_title(plan, arguments.dtype)}\n\nleast cost: {plan}\n{plan_as_table(plan, unit)}\n")
    try:
        greedy = greedy_redistribution(**common)
    except ValueError as error:
        print(f"PyTorch's greedy plan: none. {error}")
    else:
        print(f"PyTorch's greedy plan: {greedy}\n{plan_as_table(greedy, unit)}")
    if arguments.svg is not None:
        arguments.svg.write_text(plan_as_svg(plan))
        print(f"\ndrawn in {arguments.svg}")


def _run_between_meshes(arguments: argparse.Namespace, cost_model: CostModel | None) -> None:
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
    shape = "x".join(map(str, change.shape)) or "scalar"
    print(
        f"{shape} {arguments.dtype.removeprefix('torch.')} "
        f"from {_mesh_text(change.src_mesh, change.src_ranks)} "
        f"to {_mesh_text(change.dst_mesh, change.dst_ranks)}\n\nleast cost: {change}"
    )
    unit = "" if isinstance(cost_model, StepCounts) else "us"
    if change.before is not None and change.before.steps:
        print(plan_as_table(change.before, unit))
    if change.transfer is not None:
        print(
            f"  transfer {change.transfer.src} => {change.transfer.dst}: {len(change.transfer.messages)} "
            f"messages, busiest sender {bytes_text(change.transfer.busiest_sender)}, least possible "
            f"{bytes_text(change.transfer.bound)}"
        )
    if change.after is not None:
        print(plan_as_table(change.after, unit))
    print(f"  cost {change.cost:.4g}{' ' + unit if unit else ''}, peak {bytes_text(change.peak_bytes)}\n")
    print(matrix_as_table(change))
    if arguments.svg is not None:
        arguments.svg.write_text(mesh_change_as_svg(change))
        print(f"\ndrawn in {arguments.svg}")


def matrix_as_table(change: MeshChange) -> str:
    """What each rank, a line, sends to each other one, a column; and what the busiest one sends."""
    sent = [sum(row) for row in change.bytes]
    cells = [
        ["from / to", *map(str, change.ranks), "sent"],
        *(
            [str(rank), *(bytes_text(count) if count else "-" for count in row), bytes_text(total)]
            for rank, row, total in zip(change.ranks, change.bytes, sent, strict=True)
        ),
        [
            "received",
            *(bytes_text(sum(column)) for column in zip(*change.bytes, strict=True)),
            bytes_text(sum(sent)),
        ],
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    table = "\n".join(
        "  " + "  ".join(f"{text:>{width}}" for text, width in zip(row, widths, strict=True)) for row in cells
    )
    busiest = max(range(len(sent)), key=sent.__getitem__)
    least = (
        "" if change.bound is None else f"; no plan has one that sends less than {bytes_text(change.bound)}"
    )
    return f"{table}\n\nbusiest: rank {change.ranks[busiest]}, which sends {bytes_text(sent[busiest])}{least}"


def _mesh_text(mesh: _C.Mesh, ranks: tuple[int, ...]) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in zip(axis_names(mesh), mesh.sizes, strict=True))
    first, last = ranks[0], ranks[-1]
    is_row = list(ranks) == list(range(first, last + 1))
    shown = f"{first}-{last}" if is_row and first != last else ",".join(map(str, ranks))
    return f"{axes} (ranks {shown})"


def plan_as_table(plan: Plan, unit: str) -> str:
    """A line a step and one with the totals; bytes are those of the rank that sends or holds most."""
    return "\n".join(f"  {line}" for line in aligned(step_rows(plan, unit), num_left=3))


def _title(plan: Plan, dtype: str) -> str:
    shape, _, mesh = described_tensor(plan).partition(" on ")
    return f"{shape} {dtype.removeprefix('torch.')} on {mesh}"


def _shape(text: str) -> list[int]:
    sizes = text.split("x") if text else []
    if not all(size.isdecimal() for size in sizes):
        raise argparse.ArgumentTypeError(
            f'"{text}" is no shape: write sizes with an x between them, 1024x4096'
        )
    return [int(size) for size in sizes]


def _ranks(text: str) -> list[int]:
    ranks: list[int] = []
    for entry in text.split(","):
        first, dash, last = (part.strip() for part in entry.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f'"{entry}" is no rank: write numbers and ranges, 0-3,8')
        ranks.extend(range(int(first), int(last if dash else first) + 1))
    return ranks


def _cost_model(text: str | None) -> CostModel | None:
    if text is None:
        return None
    return StepCounts() if text == "step-counts" else AlphaBeta.load(text)
