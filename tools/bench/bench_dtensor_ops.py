"""Times single operators on DTensors whose decisions are remembered: plain tensors, stock DTensor, and funcol
under it. See docs/performance.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from measure import CPU, Clock, Overhead, lone_group
from runner import (
    Table,
    cells,
    each,
    mark,
    only,
    repeat,
    run,
    show,
    summaries,
    turns,
    with_side,
    without_gc,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

NUM_RANKS = 8
SIDES = ("plain", "stock", "funcol")
CHUNK_US = 4000.0
LIMIT, LIMIT_WITH_GRADIENTS = 0.35, 0.4

# The local tensors: activations cut along the batch, a weight, a norm's weight.
ROWS, LENGTH, WIDTH = 2, 4, 16

Operands = tuple[Tensor, Tensor, Tensor]
Operator = Callable[[Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Line:
    """An operator on activations ``x``, a weight ``w`` and a norm's weight ``g``."""

    name: str
    call: Operator
    differentiable: bool = True


LINES = [
    Line("add", lambda x, w, g: x + x),
    Line("mul by a number", lambda x, w, g: x * 0.5),
    Line("div", lambda x, w, g: x / x),
    Line("pow", lambda x, w, g: x.pow(2)),
    Line("silu", lambda x, w, g: torch.nn.functional.silu(x)),
    Line("gelu", lambda x, w, g: torch.nn.functional.gelu(x)),
    Line("softmax", lambda x, w, g: x.softmax(-1)),
    Line("sum of a dim", lambda x, w, g: x.sum(-1)),
    Line("mean of a dim", lambda x, w, g: x.mean(-1)),
    Line("mm", lambda x, w, g: torch.mm(w, w)),
    Line("linear", lambda x, w, g: torch.nn.functional.linear(x, w)),
    Line("bmm", lambda x, w, g: torch.bmm(x, x.mT)),
    Line("t", lambda x, w, g: w.t()),
    Line("transpose", lambda x, w, g: x.transpose(1, 2)),
    Line("view with sizes", lambda x, w, g: x.view(x.shape[0], LENGTH, 2, WIDTH // 2)),
    Line("layer_norm", lambda x, w, g: torch.nn.functional.layer_norm(x, (WIDTH,), g)),
    Line("cat", lambda x, w, g: torch.cat((x, x), 2)),
    Line("split", lambda x, w, g: x.split(WIDTH // 2, 2)),
    Line("clone", lambda x, w, g: x.clone()),
    Line("detach", lambda x, w, g: x.detach(), differentiable=False),
    Line("add_", lambda x, w, g: x.add_(1.0), differentiable=False),
    Line("foreach mul_", lambda x, w, g: torch._foreach_mul_([x, w, g], 1.0), differentiable=False),
]


def operands(mesh: DeviceMesh | None, needs_gradient: bool) -> Operands:
    """Returns this rank's operands, as DTensors if there is a mesh: the batch is cut along all axes."""

    def made(shape: Sequence[int], placement: Placement) -> Tensor:
        local = torch.rand(shape) + 0.5
        if mesh is not None:
            local = DTensor.from_local(local, mesh, [placement] * mesh.ndim)
        return local.requires_grad_(needs_gradient)

    return (
        made((ROWS, LENGTH, WIDTH), Shard(0)),
        made((WIDTH, WIDTH), Replicate()),
        made((WIDTH,), Replicate()),
    )


def call_of(line: Line, mesh: DeviceMesh | None, needs_gradient: bool) -> Callable[[], object]:
    """Returns a call of the operator, or with its backward pass into all operands that it uses."""
    given = operands(mesh, needs_gradient)
    if not needs_gradient:
        return lambda: line.call(*given)
    with torch.enable_grad():
        results = _listed(line.call(*given))
        seeds = [torch.ones_like(result).detach() for result in results]
        found = torch.autograd.grad(results, given, seeds, allow_unused=True)
    used = [one for one, gradient in zip(given, found, strict=True) if gradient is not None]
    return lambda: torch.autograd.grad(_listed(line.call(*given)), used, seeds)


def _listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


@dataclass
class Case:
    """A line on one mesh, its calls for all sides, and microseconds a call, once a round."""

    line: Line
    num_axes: int
    needs_gradient: bool
    calls: dict[str, Callable[[], object]]
    times: dict[str, list[float]]


def make_cases(meshes: Sequence[DeviceMesh], only: str) -> list[Case]:
    cases = [
        Case(line, mesh.ndim, needs_gradient, {}, {side: [] for side in SIDES})
        for needs_gradient in (False, True)
        for mesh in meshes
        for line in LINES
        if only in line.name and (line.differentiable or not needs_gradient)
    ]
    by_axes = {mesh.ndim: mesh for mesh in meshes}
    for side in SIDES:
        with with_side(side):
            for case in cases:
                mesh = None if side == "plain" else by_axes[case.num_axes]
                with torch.set_grad_enabled(case.needs_gradient):
                    case.calls[side] = call_of(case.line, mesh, case.needs_gradient)
    return cases


def time_case(case: Case, side: str, clock: Clock) -> None:
    call = case.calls[side]
    with torch.set_grad_enabled(case.needs_gradient):
        clock.time_calls(call, 20)  # decisions are made again after funcol came or went
        case.times[side].append(clock.time_calls(call, clock.calls_in(call, CHUNK_US)))


def record_of(case: Case) -> dict[str, Any]:
    limit = LIMIT_WITH_GRADIENTS if case.needs_gradient else LIMIT
    overhead = Overhead.of(*(case.times[side] for side in SIDES))
    return {
        "name": case.line.name,
        "num_axes": case.num_axes,
        "gradients": case.needs_gradient,
        "us": summaries(case.times),
        "overhead": overhead.ratio,
        "limit": limit,
        "met": overhead.is_within(limit),
    }


def bench(repeat: int, only: str) -> list[dict[str, Any]]:
    with lone_group(CPU, NUM_RANKS) as lone:
        meshes = [init_device_mesh("cpu", (NUM_RANKS,)), init_device_mesh("cpu", (NUM_RANKS // 2, 2))]
        cases = make_cases(meshes, only)
        for side in turns(SIDES, each("rounds", range(repeat))):
            with without_gc(), with_side(side):
                for case in cases:
                    time_case(case, side, lone.clock)
    return [record_of(case) for case in cases]


def print_records(records: list[dict[str, Any]]) -> None:
    for needs_gradient in (False, True):
        of_table = [record for record in records if record["gradients"] is needs_gradient]
        if not of_table:
            continue
        title = "With the backward pass" if needs_gradient else "Without gradients"
        show(
            f"{title}: us a call, median (best); overhead: funcol's above plain, of stock's",
            "{:<18}{:>6}{:>16}{:>16}{:>16}{:>10}{:>8}   {}",
            ("", "axes", *SIDES, "overhead", "limit", ""),
            (
                (
                    *(record["name"], record["num_axes"], *cells(record["us"], SIDES, 1)),
                    *(f"{record['overhead']:.3f}", record["limit"], mark(record["met"])),
                )
                for record in of_table
            ),
        )


if __name__ == "__main__":
    TABLE = Table("operators", lambda args: bench(args.repeat, args.only), print_records)
    run(__doc__, [TABLE], repeat(15), only("operators"), about="versions")
