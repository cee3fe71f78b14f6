"""Collectives older than their group, and results that are used in any order."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from differential import world_group
from ranks import device_type, on_ranks, rejoin
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from versions import HAS_RULES_OF_AN_AXIS

import funcol

ON_DEVICES = True

each_world = pytest.mark.parametrize("world", [1, 2])


# The group is destroyed


STARTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "all_reduce": lambda x, g: funcol.all_reduce(x, "sum", g),
    "all_gather_tensor": lambda x, g: funcol.all_gather_tensor(x, 1, g),
    "reduce_scatter_tensor": lambda x, g: funcol.reduce_scatter_tensor(x, "sum", 0, g),
    "all_to_all_single": lambda x, g: funcol.all_to_all_single(x, None, None, g),
    "broadcast": lambda x, g: funcol.broadcast(x, 0, g),
    "all_reduce_coalesced": lambda x, g: funcol.all_reduce_coalesced([x, x], "sum", g)[1],
    "by_name": lambda x, g: torch.ops.funcol.all_reduce(x, "sum", g.group_name),
}


@each_world
@pytest.mark.parametrize("op", [op for op in STARTS if op != "reduce_scatter_tensor"])
@pytest.mark.parametrize("destroy", ["one", "let_go", "all"])
@on_ranks()
def test_a_result_of_a_destroyed_group_raises_at_each_use(
    rank: int, world: int, op: str, destroy: str
) -> None:
    group = world_group() if destroy == "all" else dist.new_group()
    name = group.group_name
    result = STARTS[op](torch.ones(2, 2), group)
    view = result.view(-1)
    if destroy == "let_go":
        dist.destroy_process_group(group)
        del group
    elif destroy == "one":
        dist.destroy_process_group(group)
    else:
        rejoin()
    expected = op if op in STARTS and op != "by_name" else "all_reduce"
    message = rf"group '{name}' was destroyed(.|\n)*funcol::{expected} failed .*\[2, {result.shape[1]}\]"
    to_the_host = Tensor.numpy if device_type() == "cpu" else Tensor.cpu
    for use in (torch.sum, repr, to_the_host, lambda _: view + 1, funcol.wait_tensor):
        with pytest.raises(dist.DistBackendError, match=message):
            use(result)
    assert funcol.all_reduce(torch.ones(1), "sum", world_group()).item() == world


@each_world
@on_ranks()
def test_a_result_that_was_waited_for_outlives_its_group(rank: int, world: int) -> None:
    group = dist.new_group()
    used, waited = (funcol.all_reduce(torch.ones(2), "sum", group) for _ in range(2))
    assert used.sum() == 2 * world
    view = funcol.wait_tensor(waited).view(-1)
    dist.destroy_process_group(group)
    assert [t.tolist() for t in (used, waited, view)] == [[world] * 2] * 3


@each_world
@on_ranks()
def test_results_of_other_groups_stay_pending_and_right(rank: int, world: int) -> None:
    first, second = dist.new_group(), dist.new_group()
    results = [funcol.all_reduce(torch.ones(2), "sum", group) for group in (first, second, world_group())]
    dist.destroy_process_group(first)
    with pytest.raises(dist.DistBackendError, match="was destroyed"):
        results[0].sum()
    assert [r.tolist() for r in results[1:]] == [[world] * 2] * 2
    dist.destroy_process_group(second)


@pytest.mark.cpu_only  # a finished Work frees numpy's memory
@on_ranks(2)
def test_what_runs_in_a_destroyed_group_is_kept_until_it_is_done(rank: int, world: int) -> None:
    group = dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        data = np.ones((2, 3), dtype=np.float32)
        watched = weakref.ref(data)
        result = funcol.all_gather_tensor(torch.from_numpy(data), 0, group)
        dist.destroy_process_group(group)
        with pytest.raises(dist.DistBackendError, match="was destroyed"):
            result.sum()
        del data, result
        gc.collect()
        assert watched() is not None, "the input was freed while a peer may still read it"
        store.set("destroyed", "")
        deadline = time.monotonic() + 30
        while watched() is not None:
            assert time.monotonic() < deadline, "the finished Work is still kept"
            funcol._C.num_orphans()
    else:
        store.wait(["destroyed"])
        gathered = funcol.all_gather_tensor(torch.zeros(2, 3), 0, group)
        assert gathered.tolist() == [[1, 1, 1]] * 2 + [[0, 0, 0]] * 2
        dist.destroy_process_group(group)
    store.delete_key("destroyed") if rank == 1 else None


# Makes tensors on the mesh and drops them.
def maps(mesh: DeviceMesh) -> Any:
    return funcol.local_map.apply_local_map(
        torch.sin, out_placements=[Shard(0)] * 2, in_placements=([Shard(0)] * 2,)
    )(DTensor.from_local(torch.ones(1, 4, requires_grad=True), mesh, [Shard(0)] * 2))


held_map = funcol.local_map.apply_local_map(torch.sin, out_placements=[Shard(0)] * 2)

USES_OF_A_MESH: dict[str, Callable[[DeviceMesh], Any]] = {
    "distribute_tensor": lambda mesh: distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()]),
    "operators": lambda mesh: (DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)] * 2) + 1).sum(),
    "redistribute": lambda mesh: funcol.redistribute(
        DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Replicate()]), placements=[Replicate()] * 2
    ),
    "redistribute to another dtype": lambda mesh: funcol.redistribute(
        DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Replicate()]),
        placements=[Replicate()] * 2,
        forward_dtype=torch.float64,
    ),
    "redistribute to an order of axes": lambda mesh: funcol.redistribute(
        DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Replicate()]),
        placements=[Shard(0)] * 2,
        shard_order=[(0, (1, 0))],
    ),
    "apply_local_map": lambda mesh: maps(mesh),
    "apply_local_map, its gradient": lambda mesh: maps(mesh).to_local().sum().backward(),
    "apply_local_map that is kept": lambda mesh: held_map(
        DTensor.from_local(torch.ones(1, 4), mesh, [Shard(0)] * 2)
    ),
    "redistribute_many": lambda mesh: funcol.redistribute_many(
        [DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)] * 2)] * 2, [[Replicate()] * 2] * 2
    ),
}


@pytest.mark.parametrize("use", USES_OF_A_MESH)
def test_nothing_that_is_remembered_keeps_a_mesh_and_its_groups(use: str) -> None:
    if use == "operators" and not HAS_RULES_OF_AN_AXIS:
        pytest.skip("PyTorch decides, and keeps the mesh")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh(device_type(), (2, 2))
        with funcol.installed():
            USES_OF_A_MESH[use](mesh)
        watched = weakref.ref(mesh)
        del mesh
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert watched() is None


# Decisions about operators that PyTorch makes keep a mesh, as in PyTorch.
@pytest.mark.parametrize("use", [use for use in USES_OF_A_MESH if use != "operators"])
def test_a_mesh_that_is_dropped_goes_while_the_groups_stay(use: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        watched = []
        with funcol.installed():
            for i in range(3):
                mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=(f"rows{i}", f"columns{i}"))
                USES_OF_A_MESH[use](mesh)
                watched.append(weakref.ref(mesh))
                del mesh
            gc.collect()
            assert [mesh() for mesh in watched] == [None] * 3
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_a_gradient_of_a_destroyed_group_is_an_error_of_backward(rank: int, world: int) -> None:
    group = dist.new_group()

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            result = funcol.all_reduce(gradient, "sum", group)
            dist.destroy_process_group(group)
            return result

    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(dist.DistBackendError, match="was destroyed"):
        Reduced.apply(leaf * 2).sum().backward()
    assert leaf.grad is None


# Order


ORDERS: dict[str, Callable[[list[int]], list[int]]] = {
    "as_started": lambda indices: indices,
    "reversed": lambda indices: indices[::-1],
    "shuffled": lambda indices: random.Random(7).sample(indices, len(indices)),
}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_groups", [1, 3])
@on_ranks()
def test_results_may_be_used_in_any_order(rank: int, world: int, order: str, num_groups: int) -> None:
    groups = [world_group(), *(dist.new_group() for _ in range(num_groups - 1))]
    starts = list(STARTS.values())
    # Sizes that every rank count of the test divides.
    inputs = [torch.full((6, 2), float(i + rank)) for i in range(60)]
    results = [starts[i % len(starts)](x, groups[i % num_groups]) for i, x in enumerate(inputs)]
    # Each rank in an order of its own.
    indices = ORDERS[order](list(range(60)))
    indices = indices[10 * rank :] + indices[: 10 * rank]
    seen = {i: results[i].tolist() for i in indices}
    assert seen == {i: starts[i % len(starts)](x, groups[0]).tolist() for i, x in enumerate(inputs)}
    for group in groups[1:]:
        dist.destroy_process_group(group)
