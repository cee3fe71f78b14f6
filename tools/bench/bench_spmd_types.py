"""Times the collectives of ``spmd_types`` on PyTorch alone (stock) and with funcol installed.

One table, in microseconds: a collective, forward and backward, on a group that sends nothing. See README.md
beside this file.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
import torch.distributed as dist
from measure import CPU_CLOCK, add_outcomes, cell, conclude, describe, each, lone_group, mark, say, summary
from spmd_types import I, P, R, S, V
from torch import Tensor

import funcol

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


def step_of(program: Program) -> Callable[[], Any]:
    x = torch.ones(program.shape, requires_grad=True)
    gradient = torch.ones(program.shape)

    def step() -> Any:
        y = x
        for _ in range(NUM_ROUND_TRIPS):
            y = program.back(program.there(y))
        return torch.autograd.grad(y, x, gradient)

    return step


def with_side(side: str) -> AbstractContextManager[None]:
    return funcol.installed() if side == "funcol" else nullcontext()


def time_program(program: Program, repeat: int) -> dict[str, Any]:
    """Each side once a round, by turns."""
    step = step_of(program)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(repeat):
        for side in SIDES if turn % 2 == 0 else reversed(SIDES):
            with with_side(side):
                for _ in range(NUM_WARM_UP):
                    step()
                num_steps = max(1, round(CHUNK_US / CPU_CLOCK.time_calls(step, 1)))
                gc.collect()
                gc.disable()
                try:
                    whole = CPU_CLOCK.time_calls(step, num_steps)
                finally:
                    gc.enable()
                times[side].append(whole / (2 * NUM_ROUND_TRIPS))
    ratio = statistics.median(b / a for a, b in zip(times["stock"], times["funcol"], strict=True))
    return {
        "name": program.name,
        "us": {side: summary(of_side) for side, of_side in times.items()},
        "ratio": ratio,
        "limit": LIMIT,
        "met": ratio <= LIMIT,
    }


def print_records(records: list[dict[str, Any]]) -> None:
    line = "{:<46}{:>18}{:>16}{:>10}   {}"
    say("\nA collective, forward and backward, in us, median (best)")
    say(line.format("", *SIDES, "/ stock", f"limit {LIMIT:.2f}"))
    for record in records:
        times = (cell(record["us"][side], 1) for side in SIDES)
        say(line.format(record["name"], *times, f"{record['ratio']:.3f}", mark(record["met"])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9, metavar="N", help="rounds (default %(default)s)")
    parser.add_argument(
        "--ranks", type=int, default=4, metavar="N", help="of the group (default %(default)s)"
    )
    parser.add_argument("--async-op", action="store_true", help="call all with async_op=True")
    add_outcomes(parser)
    args = parser.parse_args()
    result = describe(torch.device("cpu"))
    options = {"async_op": True} if args.async_op else {}
    with lone_group(torch.device("cpu"), args.ranks):
        group = dist.group.WORLD
        assert group is not None
        all_programs = each("collectives", programs(group, **options))
        result["collectives"] = [time_program(program, args.repeat) for program in all_programs]
    print_records(result["collectives"])
    conclude(result, args)


if __name__ == "__main__":
    main()
