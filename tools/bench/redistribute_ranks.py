"""Times redistribution on gloo ranks, PyTorch's and funcol's by turns: table 4 of bench_redistribute.py."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from measure import each
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import funcol

NUM_RANKS = 4
TIMEOUT_S = 300
SIZE = 2048  # 16 MB of float32 as a whole

TRANSITIONS = [
    *[
        ("S0", "R"),
        ("R", "S0"),
        ("S0", "S1"),
        ("S1", "S0"),
        ("P", "R"),
        ("P", "S0"),
        ("P", "S1"),
        ("S1", "R"),
    ],
    *[("S0,S0", "R,R"), ("S0,S1", "R,R"), ("P,P", "R,S0"), ("S0,R", "R,S1")],
]


def placed(text: str) -> tuple[Placement, ...]:
    """``"S0,R"`` as placements."""
    letters: dict[str, Callable[[str], Placement]] = {
        "R": lambda _: Replicate(),
        "P": lambda _: Partial(),
        "S": lambda dim: Shard(int(dim)),
    }
    return tuple(letters[word[0]](word[1:]) for word in text.split(","))


def source(mesh: DeviceMesh, text: str) -> DTensor:
    placements = placed(text)
    cuts = [math.prod(mesh.size(i) for i, p in enumerate(placements) if p.is_shard(dim)) for dim in (0, 1)]
    local = torch.ones(SIZE // cuts[0], SIZE // cuts[1])
    return DTensor.from_local(local, mesh, placements, run_check=False)


def time_rank(rank: int, repeat: int) -> list[dict[str, list[float]]]:
    meshes = {1: init_device_mesh("cpu", (NUM_RANKS,)), 2: init_device_mesh("cpu", (2, NUM_RANKS // 2))}
    times = []
    for src, dst in each("ranks", TRANSITIONS, is_on=rank == 0):
        mesh = meshes[src.count(",") + 1]
        tensor, target = source(mesh, src), placed(dst)
        calls = {
            "stock": lambda tensor=tensor, mesh=mesh, target=target: tensor.redistribute(mesh, target),
            "funcol": lambda tensor=tensor, mesh=mesh, target=target: funcol.redistribute(
                tensor, mesh, target
            ),
        }
        results = {side: call().to_local() for side, call in calls.items()}
        if not torch.equal(results["stock"], results["funcol"]):
            raise RuntimeError(f"{src} -> {dst}: stock and funcol differ")
        del results
        of_case: dict[str, list[float]] = {side: [] for side in calls}
        for turn in range(repeat):
            for side in sorted(calls, reverse=turn % 2 == 0):
                dist.barrier()
                begin = time.perf_counter()
                calls[side]()
                slowest = torch.tensor([1000 * (time.perf_counter() - begin)])
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                of_case[side].append(slowest.item())
        times.append(of_case)
    return times


def sent_bytes(src: str, dst: str) -> dict[str, int]:
    """The bytes that the busiest rank sends, by PyTorch's plan and by funcol's."""
    mesh = {"world": NUM_RANKS} if "," not in src else {"outer": 2, "inner": NUM_RANKS // 2}
    planners = {"stock": funcol.redistribution.greedy_redistribution, "funcol": funcol.plan_redistribution}
    return {
        side: sum(step.bytes_sent for step in plan(src, dst, mesh, (SIZE, SIZE), torch.float32).steps)
        for side, plan in planners.items()
    }


def bench_ranks(repeat: int) -> list[dict[str, Any]]:
    """A record for each transition: medians over rounds of the slowest rank's time in ms, and bytes sent."""
    times = run_on_ranks(time_rank, NUM_RANKS, repeat, limit_s=TIMEOUT_S)
    records = []
    for (src, dst), of_case in zip(TRANSITIONS, times, strict=True):
        ratios = [a / b for a, b in zip(of_case["funcol"], of_case["stock"], strict=True)]
        records.append(
            {
                "name": f"{src} -> {dst}",
                "ms": {side: statistics.median(of_side) for side, of_side in of_case.items()},
                "ratio": statistics.median(ratios),
                "bytes": sent_bytes(src, dst),
            }
        )
    return records
