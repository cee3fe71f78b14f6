"""``python -m funcol plan``: the steps of a redistribution as a table, beside PyTorch's greedy plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..redistribution.cost_models import AlphaBeta, CostModel, StepCounts, axis_names
from ..redistribution.plan_drawing import plan_as_svg
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
    header = ("step", "before", "after", "sent a rank", f"cost, {unit}" if unit else "cost", "peak")
    rows = [
        (
            str(step),
            step.before,
            step.after,
            _bytes(step.bytes_sent),
            f"{step.cost:.4g}",
            _bytes(step.peak_bytes),
        )
        for step in plan.steps
    ]
    total = (
        "total",
        plan.src,
        plan.dst,
        _bytes(sum(step.bytes_sent for step in plan.steps)),
        f"{plan.cost:.4g}",
        _bytes(plan.peak_bytes),
    )
    lines = [header, *rows, total]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  "
        + "  ".join(
            f"{text:<{width}}" if column < 3 else f"{text:>{width}}"
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _title(plan: Plan, dtype: str) -> str:
    axes = ", ".join(
        f"{name}={size}" for name, size in zip(axis_names(plan.mesh), plan.mesh.sizes, strict=True)
    )
    return f"{'x'.join(map(str, plan.shape)) or 'scalar'} {dtype.removeprefix('torch.')} on {axes}"


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


def _bytes(count: int) -> str:
    power = min(max(count.bit_length() - 1, 0) // 10, 4)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.1f} {' KMGT'[power]}iB"
