"""Helpers for the tables of bench_weights.py on gloo ranks: a model's weights, rounds of sides that take
turns, bytes that a rank has written."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks as run_on_ranks
from measure import each
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

NUM_RANKS = 4
TIMEOUT_S = 600
NUM_BLOCKS = 33


def llama_shapes(width: int) -> dict[str, tuple[int, ...]]:
    """300 weights: 33 blocks of nine, embedding, norm and head."""
    hidden, vocabulary = 4 * width, 8 * width
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, width)}
    for block in range(NUM_BLOCKS):
        shapes |= {
            f"{block}.{name}": shape
            for name, shape in {
                "attention_norm": (width,),
                "query": (width, width),
                "key": (width // 4, width),
                "value": (width // 4, width),
                "output": (width, width),
                "mlp_norm": (width,),
                "gate": (hidden, width),
                "up": (hidden, width),
                "down": (width, hidden),
            }.items()
        }
    return shapes | {"norm": (width,), "head": (vocabulary, width)}


def fully_sharded(shapes: dict[str, tuple[int, ...]], mesh: DeviceMesh) -> dict[str, DTensor]:
    """Rows cut along the one axis of ``mesh``, as FSDP2 does; nothing is sent."""
    rank, world = mesh.get_local_rank(), mesh.size()
    weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        chunks = torch.arange(shape[0]).chunk(world)
        rows = len(chunks[rank]) if rank < len(chunks) else 0
        local = torch.full((rows, *shape[1:]), float(number % 7 + rank))
        stride = torch.empty(shape, device="meta").stride()
        weights[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
    return weights


def bytes_written() -> int:
    """By this process so far: gloo writes to sockets."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def time_sides(calls: dict[str, Callable[[], Any]], repeat: int) -> dict[str, dict[str, Any]]:
    """For each side, the slowest rank's ms by round, and the bytes that all ranks write in one call."""
    results: dict[str, dict[str, Any]] = {}
    for side, call in calls.items():
        call()
        dist.barrier()
        before = bytes_written()
        call()
        written = torch.tensor([bytes_written() - before])
        dist.all_reduce(written)
        results[side] = {"ms": [], "bytes": written.item()}
    for turn in each("rounds", range(repeat), is_on=dist.get_rank() == 0):
        for side in sorted(calls, reverse=turn % 2 == 0):
            dist.barrier()
            begin = time.perf_counter()
            calls[side]()
            slowest = torch.tensor([1000 * (time.perf_counter() - begin)])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            results[side]["ms"].append(slowest.item())
    return results


def ratio(of_sides: dict[str, dict[str, Any]], side: str, other: str) -> float:
    """The median over rounds of one side's time to another's."""
    pairs = zip(of_sides[side]["ms"], of_sides[other]["ms"], strict=True)
    return statistics.median(a / b for a, b in pairs)


def median_ms(of_side: dict[str, Any]) -> str:
    return f"{statistics.median(of_side['ms']):.1f}"


def mebibytes(of_side: dict[str, Any]) -> str:
    return f"{of_side['bytes'] / 2**20:.2f}"


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
