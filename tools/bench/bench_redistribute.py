"""Times redistribution: PyTorch's (stock), the bare collectives (raw), funcol's.

Table 1, the cost of a call in microseconds where no byte is sent; table 2, a plan that is not cached;
table 3, many tensors in one call; table 4, 16 MB on four gloo ranks. See docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from measure import CPU, CPU_CLOCK, Case, bench_cases, lone_group
from redistribute_ranks import bench_ranks, placed
from runner import Call, Table, cells, device, each, is_on_cpu, mark, median_ratio, repeat, run, show
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import _gen_transform_infos_non_cached

import funcol

NUM_RANKS = 4
SHAPE = (64, 64)
PLAN_LIMIT = 0.01
# 1, and the noise of four ranks that share two cores.
RANKS_LIMIT = 1.05


def all_gather(local: Tensor, group: Any) -> Tensor:
    whole = local.new_empty((group.size() * local.size(0), *local.shape[1:]))
    dist.all_gather_into_tensor(whole, local, group=group, async_op=True).wait()
    return whole


def all_reduce(local: Tensor, group: Any) -> Tensor:
    copy = local.clone()
    dist.all_reduce(copy, group=group, async_op=True).wait()
    return copy


def reduce_scatter(local: Tensor, group: Any) -> Tensor:
    shard = local.new_empty((local.size(0) // group.size(), *local.shape[1:]))
    dist.reduce_scatter_tensor(shard, local, group=group, async_op=True).wait()
    return shard


def all_to_all(local: Tensor, group: Any) -> Tensor:
    received = torch.empty_like(local)
    dist.all_to_all_single(received, local, group=group, async_op=True).wait()
    return received


# From, to, the bare collectives of the axes that do it, and the limit to stock.
ONE_STEP = [
    ("S0", "R", [(all_gather, 0)], 1 / 8),
    ("S1", "R", [(all_gather, 0)], 1 / 8),
    ("P", "R", [(all_reduce, 0)], 1 / 5),
    ("P", "S0", [(reduce_scatter, 0)], 1 / 8),
    ("S0", "S1", [(all_to_all, 0)], 1 / 8),
    ("S1", "S0", [(all_to_all, 0)], 1 / 8),
]
TWO_STEPS = [
    ("S0,S1", "R,R", [(all_gather, 0), (all_gather, 1)], 1 / 8),
    ("P,S0", "S0,R", [(all_gather, 1), (reduce_scatter, 0)], 1 / 8),
    ("P,P", "S0,S1", [(reduce_scatter, 0), (reduce_scatter, 1)], 1 / 8),
]


def call_cases(device: torch.device) -> Iterator[Case]:
    shapes = {1: (NUM_RANKS,), 2: (2, NUM_RANKS // 2)}
    meshes = {ndim: init_device_mesh(device.type, shape) for ndim, shape in shapes.items()}
    for src, dst, collectives, limit in [*ONE_STEP, *TWO_STEPS]:
        mesh = meshes[src.count(",") + 1]
        limits = {"stock": limit}
        if len(collectives) == 1:
            limits["raw"] = 3.0
        yield call_case(mesh, src, dst, collectives, limits)


def dtensor(mesh: DeviceMesh, src: str, shape: tuple[int, int] = SHAPE) -> DTensor:
    """Returns a DTensor of ``shape``; nothing is sent to make it."""
    placements = placed(src)
    whole = DTensor.from_local(
        torch.ones(shape, device=mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    shards = [placement if placement.is_shard() else Replicate() for placement in placements]
    local = whole.redistribute(mesh, shards).to_local()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1))


def call_case(
    mesh: DeviceMesh, src: str, dst: str, collectives: list[tuple[Any, int]], limits: dict[str, float]
) -> Case:
    target = placed(dst)
    tensor = dtensor(mesh, src)
    local = tensor.to_local()
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]

    def raw() -> Tensor:
        moved = local
        for collective, axis in collectives:
            moved = collective(moved, groups[axis])
        return moved

    return Case(
        f"{src} -> {dst}",
        lambda: tensor.redistribute(mesh, target),
        raw,
        lambda: funcol.redistribute(tensor, mesh, target),
        limits=limits,
    )


# By the number of mesh axes, of two ranks each.
PLANS = [(2, "S0,S1", "S1,S0"), (3, "S0,S1,P", "R,S0,S1"), (4, "S0,S1,R,P", "R,S0,S1,S0")]


def plan_case(num_axes: int, src: str, dst: str) -> tuple[Call, Call]:
    """Returns calls of stock's min-cost planner and of funcol's; nothing is cached."""
    mesh = init_device_mesh("cpu", (2,) * num_axes)
    shape = (16,) * max(2, num_axes - 1)
    whole = torch.empty(shape)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    placements = [placed(text) for text in (src, dst)]
    specs = [DTensorSpec(mesh, of_side, tensor_meta=meta) for of_side in placements]
    return (
        lambda: _gen_transform_infos_non_cached(*specs, use_graph_based_transform=True),
        lambda: funcol.plan_redistribution(*placements, mesh, shape, torch.float32),
    )


NUM_TENSORS = 200
MANY_SHAPE = (32, 32)
MANY_LIMIT = 1 / 20
MANY = [("S0", "R"), ("S1", "R"), ("R", "S0"), ("P", "R"), ("P", "S0"), ("S0", "S1")]


def many_case(device: torch.device, src: str, dst: str) -> dict[str, Call]:
    """Returns calls for many tensors: a loop of stock's function, of funcol's, and one call."""
    mesh = init_device_mesh(device.type, (NUM_RANKS,))
    target = placed(dst)
    tensors = [dtensor(mesh, src, MANY_SHAPE) for _ in range(NUM_TENSORS)]
    return {
        "stock": lambda: [tensor.redistribute(mesh, target) for tensor in tensors],
        "loop": lambda: [funcol.redistribute(tensor, mesh, target) for tensor in tensors],
        "funcol": lambda: funcol.redistribute_many(tensors, target),
    }


def bench_calls(device: torch.device, repeat: int) -> list[dict[str, Any]]:
    return bench_cases("calls", lambda _: call_cases(device), device, NUM_RANKS, repeat)["cases"]


def bench_plans(repeat: int) -> list[dict[str, Any]]:
    records = []
    with lone_group(CPU, 16):
        for num_axes, src, dst in each("plans", PLANS):
            stock, ours = plan_case(num_axes, src, dst)
            times: dict[str, list[float]] = {"stock": [], "funcol": []}
            for _ in range(repeat):
                times["stock"].append(CPU_CLOCK.time_calls(stock, 1))
                times["funcol"].append(CPU_CLOCK.time_calls(ours, 20))
            records.append(record_of(f"{num_axes} axes, {src} -> {dst}", times))
    return records


def bench_many(device: torch.device, repeat: int) -> list[dict[str, Any]]:
    records = []
    with lone_group(device, NUM_RANKS, whole_steps=True) as lone:
        for src, dst in each("many", MANY):
            calls = many_case(device, src, dst)
            for call in calls.values():
                lone.clock.time_calls(call, 2)
            times: dict[str, list[float]] = {side: [] for side in calls}
            for _ in range(repeat):
                for side, call in calls.items():
                    times[side].append(lone.clock.time_calls(call, 2) / NUM_TENSORS)
            records.append(record_of(f"{src} -> {dst}", times))
    return records


def record_of(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    best = {side: min(of_side) for side, of_side in times.items()}
    return {"name": name, "us": best, "ratio": median_ratio(times["funcol"], times["stock"])}


def print_calls(records: list[dict[str, Any]]) -> None:
    def row(record: dict[str, Any]) -> list[str]:
        ratios = (f"{record['ratio'][side]['median']:.3f}" for side in ("stock", "raw"))
        limits = ", ".join(
            f"{of['against']} <= {of['limit']:.3g} {mark(of['met'])}" for of in record["targets"]
        )
        return [record["name"], *cells(record["us"], ("stock", "raw", "funcol"), 1), *ratios, limits]

    show(
        "A redistribution in us, median (best)",
        "{:<16}{:>20}{:>16}{:>16}{:>10}{:>8}   {}",
        ("", "stock", "raw", "funcol", "/ stock", "/ raw", "limits"),
        map(row, records),
    )


def print_plans(records: list[dict[str, Any]]) -> None:
    show(
        "A plan that is not cached, in us, best; stock: its min-cost planner",
        "{:<36}{:>14}{:>14}{:>12}   {}",
        ("", "stock", "funcol", "/ stock", f"limit {PLAN_LIMIT}"),
        (judged(record, cells(record["us"], ("stock", "funcol"), 1), PLAN_LIMIT) for record in records),
    )


def print_many(records: list[dict[str, Any]]) -> None:
    sides = ("stock", "loop", "funcol")
    show(
        f"A tensor of {NUM_TENSORS} in us, best; loop: funcol.redistribute",
        "{:<16}{:>12}{:>12}{:>12}{:>12}   {}",
        ("", "stock", "loop", "together", "/ stock", f"limit {MANY_LIMIT}"),
        (judged(record, cells(record["us"], sides, 2), MANY_LIMIT) for record in records),
    )


def judged(record: dict[str, Any], times: list[str], limit: float) -> list[str]:
    """Returns a row of the ratio to stock and its limit."""
    return [record["name"], *times, f"{record['ratio']:.4f}", mark(record["ratio"] <= limit)]


def print_ranks(records: list[dict[str, Any]]) -> None:
    def row(record: dict[str, Any]) -> list[str]:
        name, *times, ratio, met = judged(record, cells(record["ms"], ("stock", "funcol"), 2), RANKS_LIMIT)
        sent = (f"{record['bytes'][side]:,}" for side in ("stock", "funcol"))
        return [name, *times, ratio, *sent, met]

    show(
        "16 MB on four gloo ranks in ms, median of the slowest rank's; what the plans send, in bytes a rank",
        "{:<16}{:>12}{:>12}{:>10}{:>16}{:>14}   {}",
        ("", "stock", "funcol", "/ stock", "stock sends", "funcol sends", f"limit {RANKS_LIMIT}"),
        map(row, records),
    )


TABLES = [
    Table("calls", lambda args: bench_calls(args.device, args.repeat), print_calls),
    Table("plans", lambda args: bench_plans(max(3, args.repeat // 4)), print_plans, is_on_cpu),
    Table("many", lambda args: bench_many(args.device, max(3, args.repeat // 2)), print_many),
    Table("ranks", lambda args: bench_ranks(args.repeat), print_ranks, is_on_cpu),
]

if __name__ == "__main__":
    run(__doc__, TABLES, repeat(21), device("cuda: tables 1 and 3"))
