"""Times redistribution: PyTorch's (stock), the bare collectives (raw), funcol's.

Table 1, the cost of a call in microseconds where no byte is sent; table 2, a plan that is not cached;
table 3, many tensors in one call; table 4, 16 MB on four gloo ranks. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from measure import (
    CPU_CLOCK,
    Call,
    Case,
    add_outcomes,
    cell,
    conclude,
    describe,
    device_named,
    each,
    lone_group,
    mark,
    measure,
    say,
)
from redistribute_ranks import bench_ranks, placed
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
    """A tensor that is ``shape`` as a whole; nothing is sent to make it."""
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
    """A plan of stock's min-cost planner and of funcol's; nothing is cached."""
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
    """The same for many tensors: a loop of stock's function, of funcol's, and one call."""
    mesh = init_device_mesh(device.type, (NUM_RANKS,))
    target = placed(dst)
    tensors = [dtensor(mesh, src, MANY_SHAPE) for _ in range(NUM_TENSORS)]
    return {
        "stock": lambda: [tensor.redistribute(mesh, target) for tensor in tensors],
        "loop": lambda: [funcol.redistribute(tensor, mesh, target) for tensor in tensors],
        "funcol": lambda: funcol.redistribute_many(tensors, target),
    }


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
            ratios = [a / b for a, b in zip(times["funcol"], times["stock"], strict=True)]
            best = {side: min(of_side) for side, of_side in times.items()}
            records.append({"name": f"{src} -> {dst}", "us": best, "ratio": statistics.median(ratios)})
    return records


def print_many(records: list[dict[str, Any]]) -> None:
    line = "{:<16}{:>12}{:>12}{:>12}{:>12}   {}"
    say(f"\nA tensor of {NUM_TENSORS} in us, best; loop: funcol.redistribute")
    say(line.format("", "stock", "loop", "together", "/ stock", f"limit {MANY_LIMIT}"))
    for record in records:
        times = (f"{record['us'][side]:.2f}" for side in ("stock", "loop", "funcol"))
        met = mark(record["ratio"] <= MANY_LIMIT)
        say(line.format(record["name"], *times, f"{record['ratio']:.4f}", met))


def print_ranks(records: list[dict[str, Any]]) -> None:
    line = "{:<16}{:>12}{:>12}{:>10}{:>16}{:>14}   {}"
    say(
        "\n16 MB on four gloo ranks in ms, median of the slowest rank's; what the plans send, in bytes a rank"
    )
    say(line.format("", "stock", "funcol", "/ stock", "stock sends", "funcol sends", f"limit {RANKS_LIMIT}"))
    for record in records:
        times = (f"{record['ms'][side]:.2f}" for side in ("stock", "funcol"))
        sent = (f"{record['bytes'][side]:,}" for side in ("stock", "funcol"))
        say(
            line.format(
                record["name"], *times, f"{record['ratio']:.3f}", *sent, mark(record["ratio"] <= RANKS_LIMIT)
            )
        )


def bench_calls(device: torch.device, repeat: int) -> list[dict[str, Any]]:
    with lone_group(device, NUM_RANKS) as lone:
        return [measure(case, repeat, lone.clock) for case in each("calls", call_cases(device))]


def bench_plans(repeat: int) -> list[dict[str, Any]]:
    records = []
    with lone_group(torch.device("cpu"), 16):
        for num_axes, src, dst in each("plans", PLANS):
            name = f"{num_axes} axes, {src} -> {dst}"
            stock, ours = plan_case(num_axes, src, dst)
            times: dict[str, list[float]] = {"stock": [], "funcol": []}
            for _ in range(repeat):
                times["stock"].append(CPU_CLOCK.time_calls(stock, 1))
                times["funcol"].append(CPU_CLOCK.time_calls(ours, 20))
            ratios = sorted(b / a for a, b in zip(times["stock"], times["funcol"], strict=True))
            best = {side: min(of_side) for side, of_side in times.items()}
            records.append({"name": name, "us": best, "ratio": ratios[len(ratios) // 2]})
    return records


def print_calls(records: list[dict[str, Any]]) -> None:
    line = "{:<16}{:>20}{:>16}{:>16}{:>10}{:>8}   {}"
    say("\nA redistribution in us, median (best)")
    say(line.format("", "stock", "raw", "funcol", "/ stock", "/ raw", "limits"))
    for record in records:
        times = (cell(record["us"][side], 1) for side in ("stock", "raw", "funcol"))
        ratios = (f"{record['ratio'][side]['median']:.3f}" for side in ("stock", "raw"))
        limits = ", ".join(
            f"{of['against']} <= {of['limit']:.3g} {mark(of['met'])}" for of in record["targets"]
        )
        say(line.format(record["name"], *times, *ratios, limits))


def print_plans(records: list[dict[str, Any]]) -> None:
    line = "{:<36}{:>14}{:>14}{:>12}   {}"
    say("\nA plan that is not cached, in us, best; stock: its min-cost planner")
    say(line.format("", "stock", "funcol", "/ stock", f"limit {PLAN_LIMIT}"))
    for record in records:
        times = (f"{record['us'][side]:.1f}" for side in ("stock", "funcol"))
        say(
            line.format(record["name"], *times, f"{record['ratio']:.4f}", mark(record["ratio"] <= PLAN_LIMIT))
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=21, metavar="N", help="rounds (default %(default)s)")
    add_outcomes(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: tables 1 and 3")
    args = parser.parse_args()
    device = device_named(args.device)
    result = describe(device)
    result["calls"] = bench_calls(device, args.repeat)
    print_calls(result["calls"])
    if device.type == "cpu":
        result["plans"] = bench_plans(max(3, args.repeat // 4))
        print_plans(result["plans"])
    result["many"] = bench_many(device, max(3, args.repeat // 2))
    print_many(result["many"])
    if device.type == "cpu":
        result["ranks"] = bench_ranks(args.repeat)
        print_ranks(result["ranks"])
    conclude(result, args)


if __name__ == "__main__":
    main()
