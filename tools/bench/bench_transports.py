"""Times collectives that send bytes: funcol's against those of torch.distributed, called by hand.

Ranks of a gloo group on this machine. A run takes turns between both sides, round by round; a time is that of
the slowest rank. The ratio of a run is the median over its rounds, the ratio of a row the median over the
runs. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import raw_collectives as raw
import torch
import torch.distributed as dist
from runner import (
    Table,
    cells,
    each,
    mark,
    median_ratio,
    number,
    only,
    run,
    run_on_ranks,
    show,
    time_ms,
    turns,
)
from torch import Tensor

import funcol

LIMIT = 1.05
NUM_RANKS = (2, 4)
SIZES = (2**10, 2**14, 2**18, 2**22, 2**26)  # bytes a rank sends, or gathers from each
NUM_COLUMNS = 64
SIDES = ("raw", "funcol")
NAMES = (
    *("all_reduce", "all_gather, dim 0", "all_gather, dim 1", "reduce_scatter, dim 0"),
    *("reduce_scatter, dim 1", "all_to_all", "broadcast"),
)
ROUND_MS = 20.0  # calls of a side in a round take about as long
MOST_CALLS = 200
LIMIT_S = 1800

Call = Callable[[], Tensor]


def calls(x: Tensor, num_ranks: int) -> dict[str, dict[str, Call]]:
    """Returns calls by collective and side; each gives a tensor that may be used."""
    group = dist.group.WORLD

    def funcol_call(start: Callable[..., Tensor], *args: Any) -> Call:
        return lambda: funcol.wait_tensor(start(x, *args, group))

    sides: dict[str, tuple[Call, Call]] = {
        "all_reduce": (lambda: raw.all_reduce(x), funcol_call(funcol.all_reduce, "sum")),
        "all_to_all": (lambda: raw.all_to_all(x), funcol_call(funcol.all_to_all_single, None, None)),
        "broadcast": (lambda: raw.broadcast(x), funcol_call(funcol.broadcast, 0)),
    }
    for dim in (0, 1):
        sides[f"all_gather, dim {dim}"] = (
            lambda dim=dim: raw.all_gather(x, num_ranks, dim),
            funcol_call(funcol.all_gather_tensor, dim),
        )
        sides[f"reduce_scatter, dim {dim}"] = (
            lambda dim=dim: raw.reduce_scatter(x, num_ranks, dim),
            funcol_call(funcol.reduce_scatter_tensor, "sum", dim),
        )
    return {name: dict(zip(SIDES, sides[name], strict=True)) for name in NAMES}


def shape_of(size: int, num_ranks: int, is_gather: bool) -> tuple[int, int]:
    """Returns the shape of float32 tensors of ``size`` bytes; the result of a gather has that size."""
    num_rows = size // (4 * NUM_COLUMNS * (num_ranks if is_gather else 1))
    return max(num_rows, 1 if is_gather else num_ranks), NUM_COLUMNS


def rounds_of(sides: dict[str, Call], num_rounds: int) -> list[dict[str, float]]:
    """Returns milliseconds of a call, by side, in each round."""
    for side in SIDES:
        for _ in range(2):
            sides[side]()
    dist.barrier()
    num_calls = torch.tensor(max(1, min(MOST_CALLS, int(ROUND_MS / time_ms(sides["raw"])))))
    dist.broadcast(num_calls, 0)

    def repeat(call: Call) -> None:
        for _ in range(int(num_calls)):
            call()

    rounds: list[dict[str, float]] = [{} for _ in range(num_rounds)]
    for i, side in enumerate(turns(SIDES, rounds)):
        dist.barrier()
        rounds[i // len(SIDES)][side] = time_ms(lambda side=side: repeat(sides[side])) / int(num_calls)
    return rounds


def measure_rank(rank: int, num_ranks: int, sizes: list[int], num_rounds: int, only: str) -> list[Any]:
    """Returns the rounds of each collective and size on each rank."""
    found = []
    for size in sizes:
        for name in (name for name in NAMES if only in name):
            x = torch.full(shape_of(size, num_ranks, "gather" in name), float(rank))
            sides = calls(x, num_ranks)[name]
            if not torch.equal(sides["raw"](), sides["funcol"]()):
                raise RuntimeError(f"{name} of {size} bytes: raw and funcol differ")
            of_ranks: list[Any] = [None] * num_ranks
            dist.all_gather_object(of_ranks, rounds_of(sides, num_rounds))
            found.append({"name": name, "bytes": size, "rounds": of_ranks})
    return found


def rows(num_ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    merged: dict[tuple[str, int], dict[str, list[float]]] = {}
    for _ in each(f"{num_ranks} ranks", range(args.runs)):
        run = run_on_ranks(
            measure_rank, num_ranks, num_ranks, args.sizes, args.rounds, args.only, limit_s=LIMIT_S
        )
        for record in run:
            slowest = [
                {side: max(times[side] for times in of_ranks) for side in SIDES}
                for of_ranks in zip(*record["rounds"], strict=True)
            ]
            row = merged.setdefault((record["name"], record["bytes"]), {"raw": [], "funcol": [], "ratio": []})
            for side in SIDES:
                row[side].append(statistics.median(times[side] for times in slowest))
            ours, theirs = ([times[side] for times in slowest] for side in ("funcol", "raw"))
            row["ratio"].append(median_ratio(ours, theirs))
    return [
        {
            "name": name,
            "num_ranks": num_ranks,
            "bytes": size,
            **{key: statistics.median(values) for key, values in row.items()},
            "ratios": row["ratio"],
            "met": statistics.median(row["ratio"]) <= LIMIT,
        }
        for (name, size), row in merged.items()
    ]


def text_of(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 2**20 else f"{size >> 10} KiB"


def print_rows(records: list[dict[str, Any]]) -> None:
    def row(record: dict[str, Any]) -> list[str]:
        spread = f"{min(record['ratios']):.2f} to {max(record['ratios']):.2f}"
        name = (record["name"], record["num_ranks"], text_of(record["bytes"]))
        return [*name, *cells(record, SIDES, 3), f"{record['ratio']:.3f}", spread, mark(record["met"])]

    show(
        f"funcol / raw on gloo ranks of this machine, float32, median of the runs; limit {LIMIT}",
        "{:<24}{:>7}{:>9}{:>12}{:>12}{:>8}{:>16}  {}",
        ("", "ranks", "", "raw, ms", "funcol, ms", "ratio", "of the runs", ""),
        map(row, records),
    )


def bench(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [row for num_ranks in args.ranks for row in rows(num_ranks, args)]


if __name__ == "__main__":
    run(
        __doc__,
        [Table("rows", bench, print_rows)],
        number("--runs", 5, "default %(default)s"),
        number("--rounds", 11, "of a run (default %(default)s)"),
        number("--ranks", list(NUM_RANKS), "default %(default)s", nargs="+"),
        number("--sizes", list(SIZES), "bytes (default %(default)s)", nargs="+"),
        only("collectives"),
    )
