"""Times a transformer block of DTensors on 2 x 4 ranks whose sequence lengths vary, all of them seen before.

Packed and variable-length batches have hundreds of lengths, and each length has about 80 decisions. A table
that forgets in order of use finds nothing again once a cycle of lengths is longer than it. See
docs/performance.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from measure import CPU, lone_group
from parallel_steps import NUM_HEADS, NUM_RANKS, WIDTH, Block, cut_as_megatron
from runner import Table, mark, number, run, show, with_side
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

BATCH = 4
FEW = 30
LIMIT_OF_THOUSAND = 1.3  # of the time with FEW lengths
LIMIT_OF_STOCK = 1.0


class Steps:
    """Steps forward and backward with a length of their own each."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (2, NUM_RANKS // 2), mesh_dim_names=("dp", "tp"))
        self.model = nn.Sequential(Block(WIDTH, NUM_HEADS))
        cut_as_megatron(self.model, self.mesh)

    def step(self, length: int) -> None:
        x = distribute_tensor(
            torch.ones(BATCH, length, WIDTH), self.mesh, [Shard(0), Replicate()], src_data_rank=None
        )
        self.model(x).sum().backward()
        self.model.zero_grad()

    def ms_of_pass(self, num_lengths: int) -> float:
        """Returns milliseconds a step over all lengths, one after the other."""
        begin = time.thread_time()
        for length in range(1, num_lengths + 1):
            self.step(length)
        return 1000 * (time.thread_time() - begin) / num_lengths


def resident_mb() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def time_side(side: str, num_lengths: int, num_passes: int) -> tuple[float, float]:
    """Returns milliseconds a step in the best pass but the first, and the MB that all passes took."""
    with with_side(side):
        steps = Steps()
        before = resident_mb()
        passes = [steps.ms_of_pass(num_lengths) for _ in range(num_passes)]
        return min(passes[1:]), resident_mb() - before


def bench(lengths: list[int], stock_lengths: int, passes: int) -> dict[str, Any]:
    records = []
    with lone_group(CPU, NUM_RANKS):
        stock, _ = time_side("stock", stock_lengths, 3)
        few, _ = time_side("funcol", FEW, passes)
        for num in lengths:
            ms, grown = time_side("funcol", num, passes)
            records.append({"lengths": num, "ms": ms, "few": ms / few, "stock": ms / stock, "mb": grown})
    return {"stock_ms": stock, "steps": records}


def print_steps(result: dict[str, Any]) -> None:
    def row(record: dict[str, Any]) -> list[str]:
        limits = f"stock {LIMIT_OF_STOCK} {mark(record['stock'] <= LIMIT_OF_STOCK)}"
        if record["lengths"] == 1000:
            limits += f", {FEW} lengths {LIMIT_OF_THOUSAND} {mark(record['few'] <= LIMIT_OF_THOUSAND)}"
        ratios = (f"{record[name]:.2f}" for name in ("ms", "few", "stock"))
        return [record["lengths"], *ratios, f"{record['mb']:.1f}", limits]

    show(
        f"A step with lengths in turn, seen before; stock: {result['stock_ms']:.2f} ms",
        "{:>8}{:>8}{:>14}{:>10}{:>8}   {}",
        ("lengths", "ms", f"/ {FEW} lengths", "/ stock", "MB", "limits"),
        map(row, result["steps"]),
    )


if __name__ == "__main__":
    run(
        __doc__,
        [Table("", lambda args: bench(args.lengths, args.stock_lengths, args.passes), print_steps)],
        number("--lengths", [FEW, 90, 240, 1000], "default: %(default)s", nargs="+"),
        number("--stock-lengths", 120, "default: %(default)s"),
        number("--passes", 4, "default: %(default)s"),
    )
