"""Hooks of a process group see what c10d's operators would show them, however the collective starts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import device_type, on_ranks, run_ranks
from torch import Tensor, nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import funcol

ON_DEVICES = True

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="groups have hooks from PyTorch 2.15 on"
)

Calls = list[tuple[Any, ...]]


@contextmanager
def hooked(calls: Calls) -> Iterator[None]:
    """Notes what hooks of the default group are given."""
    group = dist.group.WORLD

    def described(tensors: list[Tensor]) -> list[Any]:
        return [(tuple(one.shape), one.dtype, one.device.type) for one in tensors]

    def before(call: Any) -> None:
        tensors = described(call.input_tensors), described(call.output_tensors)
        calls.append(("before", str(call.name), call.async_op, call.root, call.op_id - first[0], *tensors))

    def after(call: Any) -> None:
        is_there = call.work is not None
        calls.append(("after", str(call.name), call.async_op, call.op_id - first[0], is_there))

    first = [0]
    group.register_pre_hook(17, lambda call: first.__setitem__(0, call.op_id))
    dist.barrier()
    group.unregister_pre_hook(17)
    group.register_pre_hook(17, before)
    group.register_post_hook(18, after)
    try:
        yield
    finally:
        group.unregister_pre_hook(17)
        group.unregister_post_hook(18)


def numbers(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + dist.get_rank()


def sends_to_the_next(_group: Any) -> Tensor:
    rank, world = dist.get_rank(), dist.get_world_size()
    received = torch.zeros(3)
    sent = funcol.isend_inplace(numbers(3), (rank + 1) % world) if rank == 0 else None
    got = funcol.irecv_inplace(received, (rank - 1) % world) if rank == 1 else None
    for one in (sent, got):
        if one is not None:
            funcol.wait_tensor(one)
    return received


Call = Callable[[Any], Any]
COLLECTIVES: dict[str, Call] = {
    "all_reduce": lambda group: funcol.all_reduce(numbers(4), "sum", group),
    "average": lambda group: funcol.all_reduce(numbers(4), "avg", group),
    "reduce": lambda group: funcol.reduce(numbers(4), "sum", 1, group),
    "gather": lambda group: funcol.all_gather_tensor(numbers(2, 3), 0, group),
    "gather along columns": lambda group: funcol.all_gather_tensor(numbers(2, 3), 1, group),
    "uneven gather": lambda group: funcol.all_gather_tensor(
        numbers(2, 1 + dist.get_rank()), 1, group, split_sizes=list(range(1, 1 + dist.get_world_size()))
    ),
    "scatter sums": lambda group: funcol.reduce_scatter_tensor(
        numbers(2 * dist.get_world_size(), 3), "sum", 0, group
    ),
    "scatter sums along columns": lambda group: funcol.reduce_scatter_tensor(
        numbers(3, 2 * dist.get_world_size()), "sum", 1, group
    ),
    "all_to_all": lambda group: funcol.all_to_all_single(
        numbers(2 * dist.get_world_size(), 3), None, None, group
    ),
    "broadcast": lambda group: funcol.broadcast(numbers(4), 1, group),
    "point to point": sends_to_the_next,
    "permute": lambda group: funcol.permute_tensor(
        numbers(4), [1, 0, *range(2, dist.get_world_size())], group
    ),
    "coalesced all_reduce": lambda group: funcol.all_reduce_coalesced([numbers(4), numbers(2)], "sum", group),
    "coalesced gather": lambda group: funcol.all_gather_into_tensor_coalesced(
        [numbers(4), numbers(2)], group
    ),
    "coalesced scatter": lambda group: funcol.reduce_scatter_tensor_coalesced(
        [numbers(4 * dist.get_world_size()), numbers(2 * dist.get_world_size())], "sum", [0, 0], group
    ),
}


def moves(_group: Any) -> list[Tensor]:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    with funcol.installed():
        x = distribute_tensor(numbers(5, 4), mesh, [Shard(0)], src_data_rank=None)
        columns = x.redistribute(placements=[Shard(1)])
        return [columns.redistribute(placements=[Replicate()]).to_local()]


def trains(_group: Any) -> list[Tensor]:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with funcol.installed():
        for layer in [*model, model]:
            fully_shard(layer, mesh=mesh)
        model(numbers(2, 4)).sum().backward()
        return [parameter.grad.to_local() for parameter in model.parameters()]  # type: ignore[union-attr]


PROGRAMS: dict[str, Call] = {**COLLECTIVES, "redistribution": moves, "FSDP2": trains}


def seen_by_hooks(call: Call, by_operators: bool) -> tuple[Calls, list[Tensor]]:
    calls: Calls = []
    group = dist.group.WORLD
    funcol._C.set_c10d_ops_are_replaced(by_operators)
    try:
        with hooked(calls):
            results = call(group)
            results = [one + 0 for one in (results if isinstance(results, (list, tuple)) else [results])]
    finally:
        funcol._C.set_c10d_ops_are_replaced(False)
    return calls, results


def shows_the_same(rank: int, world: int, name: str) -> int:
    found, results = seen_by_hooks(PROGRAMS[name], by_operators=False)
    expected, expected_results = seen_by_hooks(PROGRAMS[name], by_operators=True)
    assert found == expected
    assert all(map(torch.equal, results, expected_results))
    return len(found)


@pytest.mark.parametrize("name", PROGRAMS)
def test_hooks_see_what_operators_show_them(name: str) -> None:
    assert min(run_ranks(shows_the_same, 2, name)) >= 2


def flight_record() -> list[Any]:
    """Returns the entries of the flight recorder of the default group's backend, oldest first."""
    backend: Any = dist.group.WORLD._get_backend(torch.device(device_type()))  # type: ignore[union-attr]
    if "legacy" in str(dist.get_backend_config()):  # has a recorder of its own
        dump = c10d._dump_nccl_trace_json()  # type: ignore[attr-defined]
    else:  # gloo's, or that of the hook which PyTorch attaches to groups of NCCL
        dump = c10d._dump_fr_trace_json(backend=backend.name())
    return json.loads(dump).get("entries", [])  # type: ignore[no-any-return]


def recorded(by_operators: bool) -> list[Any]:
    """Returns what the flight recorder notes of all programs, without times and running numbers."""
    last = max((entry["record_id"] for entry in flight_record()), default=-1)
    funcol._C.set_c10d_ops_are_replaced(by_operators)
    try:
        for call in PROGRAMS.values():
            results = call(dist.group.WORLD)
            for one in results if isinstance(results, (list, tuple)) else [results]:
                one + 0
    finally:
        funcol._C.set_c10d_ops_are_replaced(False)
    kept = (
        "profiling_name",
        "input_sizes",
        "input_dtypes",
        "output_sizes",
        "output_dtypes",
        "is_p2p",
        "process_group",
        "timeout_ms",
    )
    return [
        {name: entry[name] for name in kept if name in entry}
        for entry in flight_record()
        if entry["record_id"] > last
    ]


def records_the_same(rank: int, world: int) -> int:
    found, expected = recorded(by_operators=False), recorded(by_operators=True)
    assert found == expected
    return len(found)


def test_the_flight_recorder_dumps_the_same_entries_in_the_same_order() -> None:
    assert min(run_ranks(records_the_same, 2)) >= len(PROGRAMS)


@pytest.mark.cpu_only  # on devices the check asserts within a kernel
@on_ranks(2)
def test_the_check_for_nans_refuses_before_anything_is_sent(rank: int, world: int) -> None:
    group = dist.group.WORLD
    bad = numbers(4)
    bad[1] = math.nan
    starts: list[Callable[[], object]] = [
        lambda: dist.all_reduce(bad.clone()),
        lambda: funcol.wait_tensor(funcol.all_reduce(bad, "sum", group)),
        lambda: funcol.wait_tensor(funcol.all_gather_tensor(bad, 0, group)),
        lambda: funcol.wait_tensor(funcol.all_reduce_inplace(bad.clone(), "sum", group)),
    ]
    check = c10d.NanCheckHook.attach(group)
    try:
        for start in starts:
            with pytest.raises(RuntimeError, match="NaN"):
                start()
    finally:
        check.remove()
    assert funcol.all_reduce(bad, "sum", group).isnan().tolist() == [False, True, False, False]


@on_ranks(2)
def test_nothing_is_sent_if_a_hook_raises(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD

    def refuse(call: Any) -> None:
        raise ValueError("not a number")

    group.register_pre_hook(17, refuse)
    try:
        with pytest.raises((ValueError, RuntimeError), match="not a number"):
            funcol.wait_tensor(funcol.all_reduce(numbers(4), "sum", group))
    finally:
        group.unregister_pre_hook(17)
    result = funcol.all_reduce(numbers(4), "sum", group)
    assert torch.equal(result, sum((numbers(4) - rank + one for one in range(world)), torch.zeros(4)))
