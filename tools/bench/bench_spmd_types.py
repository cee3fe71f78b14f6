"""Times the collectives of ``spmd_types`` on PyTorch alone (stock) and with funcol installed.

One table, in microseconds: a collective, forward and backward, on a group that sends nothing. See
docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
import torch.distributed as dist
from measure import CPU, CPU_CLOCK, lone_group
from runner import (
    Call,
    Option,
    Table,
    cells,
    each,
    mark,
    median_ratio,
    number,
    repeat,
    run,
    show,
    summaries,
    turns,
    with_side,
    without_gc,
)
from spmd_types import I, P, R, S, V
from torch import Tensor

LIMIT = 0.25
NUM_ROUND_TRIPS = 8  # in one graph, so that what the backward pass costs as such hardly counts
CHUNK_US = 20000.0
NUM_WARM_UP = 3
SIDES = ("stock", "funcol")

Change = Callable[[Tensor], Tensor]


class Program(NamedTuple):
    """Two changes that lead back to the shape of the input, by turns."""

    name: str
    shape: tuple[int, ...]
    there: Change
    back: Change


def programs(group: dist.ProcessGroup, **options: Any) -> Iterator[Program]:
    def change(function: Any, source: Any, target: Any, **more: Any) -> Change:
        return lambda x: function(x, group, src=source, dst=target, **more, **options)

    gather, scatter, exchange = spmd.all_gather, spmd.reduce_scatter, spmd.all_to_all
    total = change(spmd.all_reduce, P, R)
    yield Program("all_reduce P -> R", (8, 8), total, total)
    yield Program(
        "convert I -> R, all_reduce P -> I", (8, 8), change(spmd.convert, I, R), change(spmd.all_reduce, P, I)
    )
    for dim in (0, 1):
        shard = S(dim)
        name = f"all_gather {shard} -> R, reduce_scatter P -> {shard}"
        yield Program(name, (8, 8), change(gather, shard, R), change(scatter, P, shard))
    yield Program(
        "all_gather S(0) -> I, convert I -> S(0)",
        (8, 8),
        change(gather, S(0), I),
        change(spmd.convert, I, S(0)),
    )
    yield Program(
        "all_gather V -> R, reduce_scatter P -> V", (8, 8), change(gather, V, R), change(scatter, P, V)
    )
    yield Program(
        "all_to_all S(0) -> S(1) and back", (8, 8), change(exchange, S(0), S(1)), change(exchange, S(1), S(0))
    )
    yield Program("all_to_all V -> V", (group.size(), 8), change(exchange, V, V), change(exchange, V, V))
    move = spmd.redistribute
    yield Program("redistribute S(0) -> R -> S(0)", (8, 8), change(move, S(0), R), change(move, P, S(0)))


def step_of(program: Program) -> Call:
    x = torch.ones(program.shape, requires_grad=True)
    gradient = torch.ones(program.shape)

    def step() -> Any:
        y = x
        for _ in range(NUM_ROUND_TRIPS):
            y = program.back(program.there(y))
        return torch.autograd.grad(y, x, gradient)

    return step


def time_program(program: Program, repeat: int) -> dict[str, Any]:
    step = step_of(program)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for side in turns(SIDES, range(repeat)):
        with with_side(side):
            for _ in range(NUM_WARM_UP):
                step()
            num_steps = CPU_CLOCK.calls_in(step, CHUNK_US, sample=1)
            with without_gc():
                times[side].append(CPU_CLOCK.time_calls(step, num_steps) / (2 * NUM_ROUND_TRIPS))
    ratio = median_ratio(times["funcol"], times["stock"])
    return {
        "name": program.name,
        "us": summaries(times),
        "ratio": ratio,
        "limit": LIMIT,
        "met": ratio <= LIMIT,
    }


def bench(num_ranks: int, repeat: int, **options: Any) -> list[dict[str, Any]]:
    with lone_group(CPU, num_ranks):
        group = dist.group.WORLD
        assert group is not None
        return [time_program(program, repeat) for program in each("collectives", programs(group, **options))]


def print_records(records: list[dict[str, Any]]) -> None:
    show(
        "A collective, forward and backward, in us, median (best)",
        "{:<46}{:>18}{:>16}{:>10}   {}",
        ("", *SIDES, "/ stock", f"limit {LIMIT:.2f}"),
        (
            (record["name"], *cells(record["us"], SIDES, 1), f"{record['ratio']:.3f}", mark(record["met"]))
            for record in records
        ),
    )


def bench_of(args: Any) -> list[dict[str, Any]]:
    return bench(args.ranks, args.repeat, **({"async_op": True} if args.async_op else {}))


if __name__ == "__main__":
    run(
        __doc__,
        [Table("collectives", bench_of, print_records)],
        repeat(9),
        number("--ranks", 4, "of the group (default %(default)s)"),
        Option("--async-op", {"action": "store_true", "help": "call all with async_op=True"}),
    )
