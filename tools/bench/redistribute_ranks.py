"""Times redistribution on gloo ranks, PyTorch's and funcol's by turns: table 4 of bench_redistribute.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from runner import each, median_ratio, run_on_ranks, time_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import funcol

NUM_RANKS = 4
TIMEOUT_S = 300
SIZE = 2048  # 16 MB of float32 as a whole

TRANSITIONS = [
    ("S0", "R"), ("R", "S0"), ("S0", "S1"), ("S1", "S0"), ("P", "R"), ("P", "S0"), ("P", "S1"), ("S1", "R"),
    ("S0,S0", "R,R"), ("S0,S1", "R,R"), ("P,P", "R,S0"), ("S0,R", "R,S1"),
]  # fmt: skip


def placed(text: str) -> tuple[Placement, ...]:
    """Reads placements: ``"S0,R"``."""
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


def time_rank(rank: int, repeat: int) -> list[dict[str, Any]]:
    meshes = {1: init_device_mesh("cpu", (NUM_RANKS,)), 2: init_device_mesh("cpu", (2, NUM_RANKS // 2))}

    def time_transition(src: str, dst: str) -> dict[str, Any]:
        mesh = meshes[src.count(",") + 1]
        tensor, target = source(mesh, src), placed(dst)
        calls = {
            "stock": lambda: tensor.redistribute(mesh, target),
            "funcol": lambda: funcol.redistribute(tensor, mesh, target),
        }
        results = {side: call().to_local() for side, call in calls.items()}
        if not torch.equal(results["stock"], results["funcol"]):
            raise RuntimeError(f"{src} -> {dst}: stock and funcol differ")
        del results
        return time_ranks(calls, repeat)

    return [time_transition(*ends) for ends in each("ranks", TRANSITIONS, is_on=rank == 0)]


def sent_bytes(src: str, dst: str) -> dict[str, int]:
    """Returns the bytes that the busiest rank sends, by PyTorch's plan and by funcol's."""
    mesh = {"world": NUM_RANKS} if "," not in src else {"outer": 2, "inner": NUM_RANKS // 2}
    planners = {"stock": funcol.redistribution.greedy_redistribution, "funcol": funcol.plan_redistribution}
    return {
        side: sum(step.bytes_sent for step in plan(src, dst, mesh, (SIZE, SIZE), torch.float32).steps)
        for side, plan in planners.items()
    }


def bench_ranks(repeat: int) -> list[dict[str, Any]]:
    """Returns, for each transition, medians over rounds of the slowest rank's time in ms, and bytes sent."""
    times = run_on_ranks(time_rank, NUM_RANKS, repeat, limit_s=TIMEOUT_S)
    return [
        {
            "name": f"{src} -> {dst}",
            "ms": {side: statistics.median(of_side["ms"]) for side, of_side in of_case.items()},
            "ratio": median_ratio(of_case["funcol"]["ms"], of_case["stock"]["ms"]),
            "bytes": sent_bytes(src, dst),
        }
        for (src, dst), of_case in zip(TRANSITIONS, times, strict=True)
    ]
