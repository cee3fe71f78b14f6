"""Table of bench_weights.py: moves between meshes, the stock way and funcol's by turns, and the bytes sent.

PyTorch has no redistribution to another mesh: the stock way is ``full_tensor()`` and ``distribute_tensor()``,
with a send of the whole tensor in between to ranks that are not in the source mesh.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from runner import each, mark, run_on_ranks, say, time_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from weights_ranks import NUM_RANKS, TIMEOUT_S, ratio

import funcol

WIDTH = 256
NUM_LAYERS = 6
PLAN_LIMIT_US = 1000
LARGE_PLAN_LIMIT_MS = 200


class Case(NamedTuple):
    src_shape: tuple[int, ...]
    src_ranks: tuple[int, ...]
    src: tuple[str, ...]
    dst_shape: tuple[int, ...]
    dst_ranks: tuple[int, ...]
    dst: tuple[str, ...]

    def __str__(self) -> str:
        def side(shape: tuple[int, ...], ranks: tuple[int, ...], words: tuple[str, ...]) -> str:
            return f"{','.join(words)} on {'x'.join(map(str, shape))} of {ranks[0]}-{ranks[-1]}"

        return f"{side(*self[:3])} -> {side(*self[3:])}"


CASES = [
    Case((2, 2), (0, 1, 2, 3), ("S0", "S1"), (4,), (0, 1, 2, 3), ("S0",)),
    Case((4,), (0, 1, 2, 3), ("S0",), (2, 2), (0, 1, 2, 3), ("R", "S1")),
    Case((2, 2), (0, 1, 2, 3), ("R", "S0"), (2,), (1, 3), ("S1",)),
    Case((2,), (0, 1), ("S0",), (2, 2), (0, 1, 2, 3), ("R", "S1")),
    Case((2,), (0, 1), ("S0",), (2,), (2, 3), ("S1",)),
    Case((2,), (0, 1), ("R",), (2,), (2, 3), ("S0",)),
]


def placed(words: tuple[str, ...]) -> tuple[Placement, ...]:
    return tuple(Replicate() if word == "R" else Shard(int(word[1:])) for word in words)


def weights(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> list[DTensor]:
    """Returns the weights of a Llama-like model: four square matrices and three wide ones a layer."""
    shapes = [(WIDTH, WIDTH)] * 4 + [(4 * WIDTH, WIDTH)] * 2 + [(WIDTH, 4 * WIDTH)]
    return [
        distribute_tensor(torch.randn(shape), mesh, placements, src_data_rank=None)
        for _ in range(NUM_LAYERS)
        for shape in shapes
    ]


def stock(
    tensors: list[DTensor], src_ranks: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> list[DTensor]:
    dst_ranks = mesh.mesh.flatten().tolist()
    rank = dist.get_rank()
    moved = []
    for tensor in tensors:
        whole = tensor.full_tensor() if rank in src_ranks else torch.empty(tensor.shape)
        missing = [other for other in dst_ranks if other not in src_ranks]
        if missing and rank == src_ranks[0]:
            for other in missing:
                dist.send(whole, other)
        if rank in missing:
            dist.recv(whole, src_ranks[0])
        moved.append(distribute_tensor(whole, mesh, placements, src_data_rank=None))
    return moved


def calls_of(case: Case) -> tuple[list[DTensor], dict[str, Callable[[], list[DTensor]]]]:
    src_mesh, dst_mesh = (
        DeviceMesh("cpu", torch.tensor(ranks).view(shape))
        for shape, ranks in ((case.src_shape, case.src_ranks), (case.dst_shape, case.dst_ranks))
    )
    tensors, target = weights(src_mesh, placed(case.src)), placed(case.dst)
    return tensors, {
        "stock": lambda: stock(tensors, case.src_ranks, dst_mesh, target),
        "funcol": lambda: funcol.redistribute_many(tensors, target, device_mesh=dst_mesh),
    }


def time_rank(rank: int, repeat: int) -> list[dict[str, Any]]:
    records = []
    for case in each("meshes", CASES, is_on=rank == 0):
        torch.manual_seed(0)
        tensors, calls = calls_of(case)
        results = {side: call() for side, call in calls.items()}
        for ours, theirs in zip(results["funcol"], results["stock"], strict=True):
            if rank in case.dst_ranks and not torch.equal(ours.to_local(), theirs.to_local()):
                raise RuntimeError(f"{case}: stock and funcol differ")
        records.append({"sides": time_ranks(calls, repeat), "plan": planned_bytes(case, tensors)})
    return records


def planned_bytes(case: Case, tensors: list[DTensor]) -> dict[str, int]:
    """Returns the bytes that the plans send in sum, and the least that any plan sends."""
    sent = least = 0
    for tensor in tensors:
        plan = funcol.redistribution.plan_mesh_change(
            *(",".join(case.src), ",".join(case.dst)),
            *({f"a{i}": n for i, n in enumerate(shape)} for shape in (case.src_shape, case.dst_shape)),
            tuple(tensor.shape),
            "float32",
            ranks=case.src_ranks,
            to_ranks=case.dst_ranks,
        )
        sent += sum(map(sum, plan.bytes))
        least += plan.as_transfer().total
    return {"sent": sent, "least": least}


def best_seconds(call: Callable[[], object], repeat: int) -> float:
    """Returns the least processor time of a call."""
    best = float("inf")
    for _ in range(repeat):
        begin = time.thread_time()
        call()
        best = min(best, time.thread_time() - begin)
    return best


def time_plans(repeat: int) -> list[tuple[str, float]]:
    """Returns microseconds of plans that are not cached, 64 ranks to 64 ranks, best of ``repeat``."""
    cases = [
        ("S0,S1,R", "R,S0,S1", "a=4,b=4,c=4", "a=4,b=4,c=4", 64),
        ("S0,S1,R", "S1,S0,R", "a=4,b=4,c=4", "x=2,y=8,z=4", 0),
        ("S0,S1,S0", "S1,S0,R", "a=4,b=4,c=4", "x=8,y=2,z=4", 32),
        ("P,S0,S1", "S1,S0,R", "a=4,b=4,c=4", "x=4,y=4,z=4", 64),
        ("R,R,R", "S0,S1,R", "a=4,b=4,c=4", "x=2,y=8,z=4", 64),
    ]

    def plan(src: str, dst: str, mesh: str, to_mesh: str, first: int) -> object:
        ranks = range(first, first + 64)
        return funcol.redistribution.plan_mesh_change(
            src, dst, mesh, to_mesh, (4096, 4096), "bfloat16", to_ranks=ranks
        )

    return [
        (
            f"{src} on {mesh} -> {dst} on {to_mesh} from rank {first}",
            1e6 * best_seconds(partial(plan, src, dst, mesh, to_mesh, first), repeat),
        )
        for src, dst, mesh, to_mesh, first in cases
    ]


def time_large_plans(repeat: int) -> list[tuple[str, float]]:
    """Returns milliseconds of a plan of n ranks to n others with one rank's messages, best of ``repeat``."""

    def plan(dst: str, num: int) -> None:
        change = funcol.redistribution.plan_mesh_change(
            *("S0", dst, {"a": num}, {"b": num}, (num, num), "bfloat16"), to_ranks=range(num, 2 * num)
        )
        assert change.transfer is not None
        change.transfer.messages_of(num)

    return [
        (f"S0 -> {dst}, {num} ranks to {num}", 1e3 * best_seconds(partial(plan, dst, num), repeat))
        for num in (4096, 16384, 65536)
        for dst in ("S0", "S1")
    ]


def bench(repeat: int) -> dict[str, list[dict[str, Any]]]:
    moves = []
    measured = run_on_ranks(time_rank, NUM_RANKS, repeat, limit_s=TIMEOUT_S)
    for case, record in zip(CASES, measured, strict=True):
        sides = record["sides"]
        moves.append(
            {
                "name": str(case),
                "ms": {side: statistics.median(of_side["ms"]) for side, of_side in sides.items()},
                "ratio": ratio(sides, "funcol", "stock"),
                "bytes": {side: of_side["bytes"] for side, of_side in sides.items()},
                "plan": record["plan"],
            }
        )
    return {
        "moves": moves,
        "plans": [{"name": name, "us": us} for name, us in time_plans(20 * repeat)],
        "large_plans": [{"name": name, "ms": ms} for name, ms in time_large_plans(repeat)],
    }


def report(records: dict[str, list[dict[str, Any]]]) -> None:
    say(
        f"\n{NUM_LAYERS * 7} weights of {WIDTH} to {4 * WIDTH} rows to another mesh, float32, {NUM_RANKS} "
        "gloo ranks\n  slowest rank, ms: stock, funcol, ratio | MB sent: stock, funcol, plan, least"
    )
    for move in records["moves"]:
        ms, sent, plan = move["ms"], move["bytes"], move["plan"]
        mb = [count / 1e6 for count in (sent["stock"], sent["funcol"], plan["sent"], plan["least"])]
        say(
            f"  {move['name']:<50} {ms['stock']:8.1f} {ms['funcol']:8.1f} {move['ratio']:6.2f} | "
            + " ".join(f"{count:8.2f}" for count in mb)
        )
    say("plans that are not cached, 64 ranks to 64, us of CPU time")
    for plan in records["plans"]:
        say(f"  {plan['name']:<70} {plan['us']:8.0f} {mark(plan['us'] <= PLAN_LIMIT_US)}")
    say("plans of large worlds that are not cached, with one rank's messages, ms of CPU time")
    for plan in records["large_plans"]:
        say(f"  {plan['name']:<70} {plan['ms']:8.1f} {mark(plan['ms'] <= LARGE_PLAN_LIMIT_MS)}")
