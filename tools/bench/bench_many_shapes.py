"""Times a transformer block of DTensors on 2 x 4 ranks whose shapes vary, all of them seen before, and one
operator of as many shapes.

Packed and variable-length batches have hundreds of shapes, and each has about 80 decisions. A table that
forgets in order of use finds nothing again once a cycle of shapes is longer than it. Shapes are pairs of a
batch size and a length, as many of both, so that arithmetic stays small. The few shapes that the others are
compared with are drawn evenly from them, and so have as much arithmetic. Stock is timed on those few, with
batch sizes rounded to what it can cut; it remembers every call for ever, some GB for all shapes. oneDNN is
off: it makes code for each shape, and keeps that of 1,024. See docs/performance.md.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from measure import CPU, lone_group
from parallel_steps import NUM_HEADS, NUM_RANKS, WIDTH, Block, cut_as_megatron
from runner import Table, mark, number, run, say, show
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import funcol

FEW = 30
LIMITS_OF_FEW = {1000: 1.3, 10_000: 3.0}  # of the time with FEW shapes
LIMIT_OF_STOCK = 1.0
LIMIT_MB = 256
LIMIT_US = 12.0  # of one operator

Shape = tuple[int, int]


def shapes_of(count: int) -> list[Shape]:
    """``count`` pairs of a batch size and a length, in an order in which neighbours differ in both."""
    side = math.ceil(math.sqrt(count))
    pairs = [(4 + 2 * batch, 2 + length) for batch in range(side) for length in range(side)]
    step = next(step for step in range(side + 1, 2 * len(pairs)) if math.gcd(step, len(pairs)) == 1)
    return [pairs[i * step % len(pairs)] for i in range(count)]


def few_of(shapes: list[Shape]) -> list[Shape]:
    return sorted(shapes)[:: max(1, len(shapes) // FEW)][:FEW]


def fit_for_stock(shapes: list[Shape]) -> list[Shape]:
    """``shapes`` with batch sizes that stock can view as 2 x 4 shards."""
    return [(max(8, 8 * round(batch / 8)), length) for batch, length in shapes]


class Steps:
    """Steps forward and backward with a shape of its own each."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, NUM_RANKS // 2), mesh_dim_names=("dp", "tp"))
        self.model = nn.Sequential(Block(WIDTH, NUM_HEADS))
        cut_as_megatron(self.model, self.mesh)

    def step(self, shape: Shape) -> None:
        x = distribute_tensor(
            torch.ones(*shape, WIDTH), self.mesh, [Shard(0), Replicate()], src_data_rank=None
        )
        self.model(x).sum().backward()
        self.model.zero_grad()

    def ms_of_pass(self, shapes: list[Shape]) -> float:
        """Returns milliseconds a step over all shapes, one after the other."""
        begin = time.thread_time()
        for shape in shapes:
            self.step(shape)
        return 1000 * (time.thread_time() - begin) / len(shapes)

    def best_ms(self, shapes: list[Shape], num_passes: int) -> float:
        """Returns milliseconds a step in the best pass but the first."""
        return min([self.ms_of_pass(shapes) for _ in range(num_passes)][1:])


def resident_mb() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def us_of_operator(num_shapes: int, num_passes: int) -> float:
    """Returns microseconds of ``x * 2`` on DTensors of as many shapes in turn, made before, in the best pass
    but the first."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    local = torch.ones(1)
    few = 1000  # tensors at a time
    times = []
    for _ in range(num_passes):
        total = 0.0
        for begin in range(0, num_shapes, few):
            end = min(begin + few, num_shapes)
            tensors = [
                DTensor.from_local(local, mesh, [Replicate()], shape=torch.Size([size]), stride=(1,))
                for size in range(begin + 1, end + 1)
            ]
            start = time.thread_time()
            for tensor in tensors:
                tensor * 2
            total += time.thread_time() - start
        times.append(1e6 * total / num_shapes)
    return min(times[1:])


def bench_steps(counts: list[int], passes: int) -> list[dict[str, Any]]:
    records = []
    torch._C._set_mkldnn_enabled(False)
    with lone_group(CPU, NUM_RANKS):
        for num in counts:
            shapes = shapes_of(num)
            stock = Steps().best_ms(fit_for_stock(few_of(shapes)), passes)
            with funcol.installed():
                few = Steps().best_ms(few_of(shapes), passes)
                before = resident_mb()
                ms = Steps().best_ms(shapes, passes)
                mb = {
                    "mb": resident_mb() - before,
                    "tables_mb": sum(funcol._C.table_bytes().values()) / 2**20,
                }
            records.append({"shapes": num, "ms": ms, "few": few, "stock": stock, **mb})
    return records


def print_steps(records: list[dict[str, Any]]) -> None:
    def row(record: dict[str, Any]) -> list[str]:
        num, ms, few, stock, mb, tables = record.values()
        limits = f"stock {LIMIT_OF_STOCK} {mark(ms <= LIMIT_OF_STOCK * stock)}"
        limits += f", tables {tables:.0f} MB of {LIMIT_MB} {mark(tables <= LIMIT_MB)}"
        if (limit := LIMITS_OF_FEW.get(num)) is not None:
            limits += f", {FEW} shapes {limit} {mark(ms <= limit * few)}"
        return [num, *(f"{x:.2f}" for x in (ms, few, stock, ms / few, ms / stock)), f"{mb:.0f}", limits]

    show(
        "A step with shapes in turn, seen before",
        "{:>8}{:>8}{:>8}{:>8}{:>10}{:>9}{:>8}   {}",
        ("shapes", "ms", f"of {FEW}", "stock", f"/ of {FEW}", "/ stock", "MB", ""),
        map(row, records),
    )


def bench_operator(num_shapes: int) -> dict[str, float]:
    with lone_group(CPU, NUM_RANKS):
        stock = us_of_operator(min(num_shapes, 1000), 3)
        with funcol.installed():
            return {"shapes": num_shapes, "us": us_of_operator(num_shapes, 3), "stock_us": stock}


def print_operator(found: dict[str, float]) -> None:
    say(
        f"\nx * 2, {found['shapes']} shapes in turn, seen before: {found['us']:.1f} us, "
        f"stock with at most 1000: {found['stock_us']:.1f} us; "
        f"limit {LIMIT_US} us {mark(found['us'] <= LIMIT_US)}"
    )


if __name__ == "__main__":
    run(
        __doc__,
        [
            Table("steps", lambda args: bench_steps(args.shapes, args.passes), print_steps),
            Table("operator", lambda args: bench_operator(args.operator_shapes), print_operator),
        ],
        number("--shapes", [90, 240, 1000, 10000], "default: %(default)s", nargs="+"),
        number("--operator-shapes", 100_000, "default: %(default)s"),
        number("--passes", 4, "default: %(default)s"),
        chooses=True,
    )
