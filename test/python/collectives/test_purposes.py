"""Purposes of collectives in flight: their names in the list, in profiles and for hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import world_group
from in_flight import in_flight, peer_that_comes_late, recording
from ranks import on_ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import funcol


class OneMatmul(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.forward = lambda x: funcol.all_reduce(x, "sum", group)  # type: ignore[method-assign]
        self.seen: list[str | None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


@on_ranks(2)
def test_modules_name_their_collectives_and_those_of_their_gradients(rank: int, world: int) -> None:
    model = OneMatmul(world_group())
    x = torch.ones(2, requires_grad=True)
    with peer_that_comes_late(rank) as is_alone:
        if is_alone:
            with recording():
                with funcol.collectives.name_modules(model):
                    result = model(x)
                    assert [one.purpose for one in funcol.pending()] == ["inner"]
                after = funcol.all_reduce(torch.ones(3), "sum", world_group())
                assert [one.purpose for one in funcol.pending()] == ["inner", None]
    if rank != 0:
        result = model(x)
        after = funcol.all_reduce(torch.ones(3), "sum", world_group())
    assert (result.tolist(), after.tolist()) == ([2.0] * 2, [2.0] * 3)
    with peer_that_comes_late(rank) as is_alone:
        if is_alone:
            with recording():
                result.sum().backward()
                assert [one.purpose for one in funcol.pending()] == ["inner"]
    if rank != 0:
        result.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def spec_of(dtensor: Any, placements: list[Any]) -> Any:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    return DTensorSpec(dtensor.device_mesh, tuple(placements), dtensor._spec.tensor_meta)


@on_ranks(2)
def test_a_step_of_a_redistribution_names_its_collective(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    dtensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with peer_that_comes_late(rank) as is_alone:
        if is_alone:
            with recording():
                local = funcol.redistribution.redistribute_local_tensor(
                    dtensor.to_local(), dtensor._spec, spec_of(dtensor, [Replicate()]), async_op=True
                )
                [listed] = in_flight("all_gather_tensor")
                assert listed.purpose == "redistribute S(0)->R: all_gather(dim 0, tp)"
    if rank != 0:
        local = funcol.redistribution.redistribute_local_tensor(
            dtensor.to_local(), dtensor._spec, spec_of(dtensor, [Replicate()])
        )
    assert local.tolist() == [[1.0] * 4] * 4


def names_in_profile(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    with funcol.installed():
        a = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
        b = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            a.full_tensor()
            a.add(b).full_tensor()
            funcol.all_reduce(torch.ones(2), "sum", world_group()).sum()
    return sorted({str(event.name) for event in profile.events()})


def test_profiles_have_the_purposes_as_names() -> None:
    for names in run_ranks(names_in_profile, 2):
        if hasattr(dist, "record_comm"):
            assert "redistribute S(1)->R: all_gather(dim 1, tp)" in names
        assert "gloo:all_reduce" in names


# Hooks of the group


@contextmanager
def hooked(group: dist.ProcessGroup) -> Iterator[list[tuple[str, str]]]:
    """Yields the collectives that a hook of ``group`` sees, and the names that c10d has for them."""
    seen: list[tuple[str, str]] = []
    current_name: Any = torch._C._distributed_c10d._get_comm_profiling_name
    group.register_pre_hook(17, lambda call: seen.append((str(call.name), current_name())))
    try:
        yield seen
    finally:
        group.unregister_pre_hook(17)


has_hooks = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="groups have hooks from PyTorch 2.15 on"
)


@has_hooks
@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_hooks_of_a_group_such_as_the_flight_recorders_see_each_collective(rank: int, world: int) -> None:
    group = dist.new_group()
    with hooked(group) as seen:
        for call in (
            lambda x: funcol.all_reduce(x, "sum", group),
            lambda x: funcol.all_gather_tensor(x, 1, group),
            lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, group),
            lambda x: funcol.broadcast(x, 0, group),
        ):
            call(torch.ones(2, 2)).sum()
            assert len(seen) == 1
            seen.clear()
    funcol.all_reduce(torch.ones(2), "sum", group).sum()
    assert seen == []
    dist.destroy_process_group(group)


@has_hooks
@on_ranks(2)
def test_an_operator_that_moves_its_arguments_names_their_collectives(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    columns = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    with funcol.installed(), recording(), hooked(mesh.get_group()) as seen:
        for _ in range(2):  # the first time the operator's decision is made
            torch.mm(columns, columns)
    assert seen[-1][1].startswith("aten::mm / redistribute S(1)->"), seen
    assert rows is not columns


@has_hooks
@on_ranks(2)
def test_fsdp2_names_the_parameters_of_its_collectives(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with funcol.installed(), recording():
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with hooked(mesh.get_group()) as seen:
            model(torch.ones(2, 4)).sum().backward()
    gathers = [name for call, name in seen if "GATHER" in call]
    scatters = [name for call, name in seen if "SCATTER" in call]
    assert gathers == [f"parameters of {layer}" for layer in (0, 1, 1, 0)]  # forward, backward
    assert scatters == [f"parameters of {layer}" for layer in (1, 0)]
