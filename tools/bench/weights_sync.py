"""From a trainer to an engine, a table of bench_weights.py: 300 weights of two gloo ranks, cut along rows, to
two others, cut along columns.

Full is what programs do without it: funcol.full_tensors to rank 0 of the trainer, a broadcast of each tensor,
and each rank of the engine takes its part. Sync is a funcol.WeightSync; changed is one that sends changes
alone, after 3 of the 300 weights changed. Time, and the bytes of weights that all ranks send.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from runner import mark, run_on_ranks, show, time_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from weights_ranks import (
    NUM_RANKS,
    TIMEOUT_S,
    fully_sharded,
    llama_shapes,
    median_ms,
    ratio,
    same,
)

import funcol

WIDTHS = {"small": 32, "medium": 96}
TIME_LIMITS = {"small": 0.15, "medium": 1.0}
CHANGED_LIMIT = 0.03
TRAINER, ENGINE = [0, 1], [2, 3]


def engine_weights(shapes: dict[str, tuple[int, ...]], mesh: DeviceMesh) -> dict[str, DTensor]:
    """Columns cut along the one axis of ``mesh``; norms are replicated."""
    return {
        name: DTensor.from_local(
            torch.zeros(shape if len(shape) == 1 else (shape[0], shape[1] // mesh.size())),
            mesh,
            [Replicate() if len(shape) == 1 else Shard(1)],
            run_check=False,
        )
        for name, shape in shapes.items()
    }


def least_bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    """The least that all ranks together send in any plan."""
    least = 0
    for shape in shapes.values():
        change = funcol.redistribution.plan_mesh_change(
            *("S0", "R" if len(shape) == 1 else "S1", {"a": 2}, {"b": 2}, shape, "float32"), to_ranks=ENGINE
        )
        least += change.as_transfer().total
    return least


def time_rank(rank: int, width: int, repeat: int) -> dict[str, Any]:
    shapes = llama_shapes(width)
    meshes = DeviceMesh("cpu", TRAINER), DeviceMesh("cpu", ENGINE)
    receivers = dist.new_group([0, *ENGINE])
    source = fully_sharded(shapes, meshes[0]) if rank in TRAINER else None
    destination = engine_weights(shapes, meshes[1]) if rank in ENGINE else None

    def full() -> None:
        if source is not None:
            for _, whole in funcol.full_tensors(source, to=0, group=meshes[0].get_group()):
                if whole is not None:
                    dist.broadcast(whole, 0, receivers)
            return
        assert destination is not None
        for name, shape in shapes.items():
            whole = torch.empty(shape)
            dist.broadcast(whole, 0, receivers)
            part = whole if len(shape) == 1 else whole.chunk(2, 1)[ENGINE.index(rank)]
            destination[name].to_local().copy_(part)

    sync = funcol.WeightSync(source, destination)
    changes = funcol.WeightSync(source, destination, changed_only=True)

    def changed() -> int:
        for weight in [*(source or {}).values()][:: len(shapes) // 3]:
            weight.to_local().add_(1)
        return changes()

    def locals_() -> list[Tensor]:
        return [weight.to_local().clone() for weight in (destination or {}).values()]

    full()
    expected, sent = locals_(), {}
    for weight in (destination or {}).values():
        weight.to_local().zero_()
    sent["sync"] = sync()
    if not same(expected, locals_()):
        raise RuntimeError("the engine's weights differ")
    changes()
    sent["changed"] = changed()
    found = locals_()
    full()
    if not same(found, locals_()):
        raise RuntimeError("the engine's weights differ after changes")
    counts = torch.tensor([*sent.values()])
    dist.all_reduce(counts)
    times = time_ranks({"full": full, "sync": sync, "changed": changed}, repeat)
    return {
        "sides": times,
        "sent": dict(zip(sent, counts.tolist(), strict=True)),
        "least": least_bytes(shapes),
    }


def bench(repeat: int) -> dict[str, Any]:
    return {
        name: run_on_ranks(time_rank, NUM_RANKS, width, repeat, limit_s=TIMEOUT_S)
        for name, width in WIDTHS.items()
    }


def report(results: dict[str, Any]) -> None:
    form = "{:<10}{:>12}{:>12}{:>12}{:>14}   {}"
    sides = ("full", "sync", "changed")
    times, sizes = [], []
    for name, of_case in results.items():
        share = ratio(of_case["sides"], "sync", "full")
        limit = TIME_LIMITS[name]
        medians = [median_ms(of_case["sides"][side]) for side in sides]
        times.append((name, *medians, f"{share:.3f}", f"{limit} {mark(share <= limit)}"))
        sent, least = of_case["sent"], of_case["least"]
        share = sent["changed"] / sent["sync"]
        met = f"least {mark(sent['sync'] == least)}, {CHANGED_LIMIT} {mark(share <= CHANGED_LIMIT)}"
        counts = [f"{count / 2**20:.2f}" for count in (least, sent["sync"], sent["changed"])]
        sizes.append((name, *counts, f"{share:.4f}", met))
    show(
        "300 weights from 2 gloo ranks to 2 others in ms, median of the slowest rank's",
        form,
        ("", *sides, "sync / full", "limit"),
        times,
    )
    show(
        "MiB of weights that all ranks send",
        form,
        ("", "least", "sync", "changed", "changed / sync", "limit"),
        sizes,
    )
