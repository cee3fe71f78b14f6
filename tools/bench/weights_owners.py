"""Owners: matrices whole on one rank each and back, a table of bench_weights.py.

On four gloo ranks, for 100 matrices of several sizes, cut along rows: each is whole once, on its owner
(owners); on every rank, by one call of funcol.redistribute_many (gathered); by a loop of DTensor.full_tensor
(stock). All ways back give shards. Time, and the bytes that a rank writes.
"""

from __future__ import annotations

from typing import Any

from runner import mark, run_on_ranks, show, time_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from weights_ranks import NUM_RANKS, TIMEOUT_S, fully_sharded, mebibytes, median_ms, ratio, same

import funcol

SHAPES = {str(index): (32 * (index % 7 + 1), 64 * (index % 3 + 1)) for index in range(100)}


def time_rank(rank: int, repeat: int) -> dict[str, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    weights = [*fully_sharded(SHAPES, mesh).values()]
    owners = [
        funcol.redistribution.Owned(owner)
        for owner in funcol.redistribution.assign_owners(SHAPES.values(), NUM_RANKS)
    ]

    def owned() -> list[DTensor]:
        return funcol.redistribute_many(funcol.redistribute_many(weights, owners), [Shard(0)])

    def gathered() -> list[DTensor]:
        return funcol.redistribute_many(funcol.redistribute_many(weights, [Replicate()]), [Shard(0)])

    def stock() -> list[DTensor]:
        wholes = (
            DTensor.from_local(one.full_tensor(), mesh, [Replicate()], run_check=False) for one in weights
        )
        return [whole.redistribute(placements=[Shard(0)]) for whole in wholes]

    locals_ = [weight.to_local() for weight in weights]
    for way in (owned, gathered, stock):
        if not same(locals_, [result.to_local() for result in way()]):
            raise RuntimeError(f"{way.__name__}: the shards differ")
    return time_ranks({"stock": stock, "gathered": gathered, "owners": owned}, repeat)


def bench(repeat: int) -> dict[str, dict[str, Any]]:
    of_sides: dict[str, dict[str, Any]] = run_on_ranks(time_rank, NUM_RANKS, repeat, limit_s=TIMEOUT_S)
    return of_sides


def report(of_sides: dict[str, dict[str, Any]]) -> None:
    sides = ("stock", "gathered", "owners")
    by_bytes = of_sides["owners"]["bytes"] / of_sides["gathered"]["bytes"]
    limit = 2 / NUM_RANKS
    times = (median_ms(of_sides[side]) for side in sides)
    sizes = (mebibytes(of_sides[side]) for side in sides)
    show(
        "100 matrices to their owners and back on four gloo ranks, median of the slowest rank's time",
        "{:<24}{:>12}{:>12}{:>12}{:>14}   {}",
        ("", *sides, "/ gathered", "limit"),
        [
            ("ms", *times, f"{ratio(of_sides, 'owners', 'gathered'):.3f}", ""),
            ("MiB, all ranks", *sizes, f"{by_bytes:.3f}", f"{limit} {mark(by_bytes <= limit + 0.01)}"),
        ],
    )
