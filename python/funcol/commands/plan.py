"""``python -m funcol plan``: the steps of a redistribution as a table, beside PyTorch's greedy plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..redistribution.cost_models import AlphaBeta, CostModel, StepCounts
from ..redistribution.plan_drawing import plan_as_svg
from ..redistribution.plan_tables import aligned, described_tensor, step_rows
from ..redistribution.planning import Plan, greedy_redistribution, plan_redistribution


def add_to(commands: Any) -> None:
    """Adds the command to argparse's ``commands``."""
    command = commands.add_parser(
        "plan",
        help="the steps of least cost from one layout of a tensor to another",
        description="Prints the steps of least cost that turn SRC into DST, and PyTorch's greedy plan. "
        "Needs no process group.",
        epilog="example: python -m funcol plan --mesh dp=2,tp=4 --shape 1024x4096 --dtype bfloat16 S0,R R,S1",
    )
    command.add_argument(
        "src", metavar="SRC", help='a placement for each mesh axis: "S0,R", "P(max),_S(0, 2)"'
    )
    command.add_argument("dst", metavar="DST")
    command.add_argument("--mesh", required=True, metavar="NAME=RANKS,...", help="the axes: dp=2,tp=4")
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


def _cost_model(text: str | None) -> CostModel | None:
    if text is None:
        return None
    return StepCounts() if text == "step-counts" else AlphaBeta.load(text)
