"""Times a transformer block of DTensors on 2 x 4 ranks whose sequence lengths vary, all of them seen before.

Packed and variable-length batches have hundreds of lengths, and each length has about 80 decisions. A table
that forgets in order of use finds nothing again once a cycle of lengths is longer than it. See
docs/performance.md.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from measure import add_outcomes, conclude, describe, lone_group, mark, say
from parallel_steps import NUM_HEADS, NUM_RANKS, WIDTH, Block, cut_as_megatron
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import funcol

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
        """Milliseconds a step over all lengths, one after the other."""
        begin = time.thread_time()
        for length in range(1, num_lengths + 1):
            self.step(length)
        return 1000 * (time.thread_time() - begin) / num_lengths


def resident_mb() -> float:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1024


def time_side(num_lengths: int, num_passes: int, *, with_funcol: bool) -> tuple[float, float]:
    """Milliseconds a step in the best pass but the first, and the memory, in MB, that all passes took."""
    with funcol.installed() if with_funcol else nullcontext():
        steps = Steps()
        before = resident_mb()
        passes = [steps.ms_of_pass(num_lengths) for _ in range(num_passes)]
        return min(passes[1:]), resident_mb() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[FEW, 90, 240, 1000], metavar="N")
    parser.add_argument("--stock-lengths", type=int, default=120, metavar="N", help="default: %(default)s")
    parser.add_argument("--passes", type=int, default=4, metavar="N", help="default: %(default)s")
    add_outcomes(parser)
    args = parser.parse_args()
    result = describe(torch.device("cpu"))
    records = []
    with lone_group(torch.device("cpu"), NUM_RANKS):
        stock, _ = time_side(args.stock_lengths, 3, with_funcol=False)
        say(f"\nA step with lengths in turn, seen before; stock: {stock:.2f} ms")
        few, _ = time_side(FEW, args.passes, with_funcol=True)
        say(
            "{:>8}{:>8}{:>14}{:>10}{:>8}   {}".format(
                "lengths", "ms", f"/ {FEW} lengths", "/ stock", "MB", "limits"
            )
        )
        for num in args.lengths:
            ms, grown = time_side(num, args.passes, with_funcol=True)
            limits = f"stock {LIMIT_OF_STOCK} {mark(ms <= LIMIT_OF_STOCK * stock)}"
            if num == 1000:
                limits += f", {FEW} lengths {LIMIT_OF_THOUSAND} {mark(ms <= LIMIT_OF_THOUSAND * few)}"
            say(f"{num:>8}{ms:>8.2f}{ms / few:>14.2f}{ms / stock:>10.2f}{grown:>8.1f}   {limits}")
            records.append({"lengths": num, "ms": ms, "few": ms / few, "stock": ms / stock, "mb": grown})
    conclude(result | {"stock_ms": stock, "steps": records}, args)


if __name__ == "__main__":
    main()
