"""Times collectives that send bytes: funcol's against those of torch.distributed, called by hand.

Ranks of a gloo group on this machine. A run takes turns between both sides, round by round; a time is that of
the slowest rank. The ratio of a run is the median over its rounds, the ratio of a row the median over the
runs. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import raw_collectives as raw
import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from measure import add_outcomes, conclude, describe, each, mark, say, time_ms
from torch import Tensor

import funcol

LIMIT = 1.05
NUM_RANKS = (2, 4)
SIZES = (2**10, 2**14, 2**18, 2**22, 2**26)  # bytes a rank sends, or gathers from each
NUM_COLUMNS = 64
SIDES = ("raw", "funcol")
ROUND_MS = 20.0  # calls of a side in a round take about as long
MOST_CALLS = 200
LIMIT_S = 1800

Call = Callable[[], Tensor]


def calls(x: Tensor, num_ranks: int) -> dict[str, dict[str, Call]]:
    """By collective and side; each gives a tensor that may be used."""
    group = dist.group.WORLD

    def funcol_call(start: Callable[..., Tensor], *args: Any) -> Call:
        return lambda: funcol.wait_tensor(start(x, *args, group))

    return {
        "all_reduce": {"raw": lambda: raw.all_reduce(x), "funcol": funcol_call(funcol.all_reduce, "sum")},
        "all_gather, dim 0": {
            "raw": lambda: raw.all_gather(x, num_ranks),
            "funcol": funcol_call(funcol.all_gather_tensor, 0),
        },
        "all_gather, dim 1": {
            "raw": lambda: raw.all_gather(x, num_ranks, 1),
            "funcol": funcol_call(funcol.all_gather_tensor, 1),
        },
        "reduce_scatter, dim 0": {
            "raw": lambda: raw.reduce_scatter(x, num_ranks),
            "funcol": funcol_call(funcol.reduce_scatter_tensor, "sum", 0),
        },
        "reduce_scatter, dim 1": {
            "raw": lambda: raw.reduce_scatter(x, num_ranks, 1),
            "funcol": funcol_call(funcol.reduce_scatter_tensor, "sum", 1),
        },
        "all_to_all": {
            "raw": lambda: raw.all_to_all(x),
            "funcol": funcol_call(funcol.all_to_all_single, None, None),
        },
        "broadcast": {"raw": lambda: raw.broadcast(x), "funcol": funcol_call(funcol.broadcast, 0)},
    }


def shape_of(size: int, num_ranks: int, is_gather: bool) -> tuple[int, int]:
    """Of float32 tensors of ``size`` bytes; what a gather gives has that size."""
    num_rows = size // (4 * NUM_COLUMNS * (num_ranks if is_gather else 1))
    return max(num_rows, 1 if is_gather else num_ranks), NUM_COLUMNS


def rounds_of(sides: dict[str, Call], num_rounds: int) -> list[dict[str, float]]:
    """Milliseconds of a call, by side, in each round."""
    for side in SIDES:
        for _ in range(2):
            sides[side]()
    dist.barrier()
    num_calls = torch.tensor(max(1, min(MOST_CALLS, int(ROUND_MS / time_ms(sides["raw"])))))
    dist.broadcast(num_calls, 0)

    def repeat(call: Call) -> None:
        for _ in range(int(num_calls)):
            call()

    rounds = []
    for i in range(num_rounds):
        times = {}
        for side in SIDES if i % 2 else SIDES[::-1]:
            dist.barrier()
            times[side] = time_ms(lambda side=side: repeat(sides[side])) / int(num_calls)
        rounds.append(times)
    return rounds


def measure_rank(rank: int, num_ranks: int, sizes: list[int], num_rounds: int, only: str) -> list[Any]:
    """The rounds of each collective and size on each rank."""
    found = []
    for size in sizes:
        for name in calls(torch.empty(0), num_ranks):
            if only not in name:
                continue
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
    for _ in each(f"{num_ranks} ranks", list(range(args.runs))):
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
            row["ratio"].append(statistics.median(times["funcol"] / times["raw"] for times in slowest))
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


def print_rows(records: list[dict[str, Any]], runs: int) -> None:
    say(f"\nfuncol / raw on gloo ranks of this machine, float32, median of {runs} runs; limit {LIMIT}")
    line = "{:<24}{:>7}{:>9}{:>12}{:>12}{:>8}{:>16}  {}"
    say(line.format("", "ranks", "", "raw, ms", "funcol, ms", "ratio", "of the runs", ""))
    for record in records:
        spread = f"{min(record['ratios']):.2f} to {max(record['ratios']):.2f}"
        times = (f"{record[side]:.3f}" for side in SIDES)
        row = (record["name"], record["num_ranks"], text_of(record["bytes"]), *times)
        say(line.format(*row, f"{record['ratio']:.3f}", spread, mark(record["met"])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="of a run (default %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(NUM_RANKS), metavar="N")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="BYTES")
    parser.add_argument("--only", default="", metavar="TEXT", help="collectives whose names hold TEXT")
    add_outcomes(parser)
    args = parser.parse_args()
    records = [row for num_ranks in args.ranks for row in rows(num_ranks, args)]
    print_rows(records, args.runs)
    conclude({**describe(torch.device("cpu")), "rows": records}, args)


if __name__ == "__main__":
    main()
