"""Programs in whose middle a rank fails.

Each is made once on every rank, of groups of its own, and gives a step: a call that uses results of
collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from fsdp_programs import blocks, sharded
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import funcol

Step = Callable[[], object]
# Makes a group of these ranks, or of all; every rank calls it.
NewGroup = Callable[..., dist.ProcessGroup]

# On older releases FSDP2 starts its collectives itself, and their errors are gloo's own.
runs_fsdp2 = pytest.mark.skipif(torch.__version__ < "2.15", reason="FSDP2's groups are PyTorch's own there")


class Program(NamedTuple):
    make: Callable[[int, int, NewGroup], Step]  # of rank, number of ranks, new_group
    # How many collectives the failing rank still starts in a step, so that its peers wait within it.
    num_before: int
    worlds: tuple[int, ...] = (2, 4)


def line_mesh(world: int, new_group: NewGroup) -> DeviceMesh:
    return DeviceMesh.from_group(new_group(), "cpu", mesh_dim_names=("x",))


def square_mesh(rank: int, new_group: NewGroup) -> DeviceMesh:
    """Of 2 x 2 ranks."""
    columns = [new_group([0, 2]), new_group([1, 3])]
    rows = [new_group([0, 1]), new_group([2, 3])]
    groups = [columns[rank % 2], rows[rank // 2]]
    return DeviceMesh.from_group(groups, "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=("y", "x"))


def pending_collective(rank: int, world: int, new_group: NewGroup) -> Step:
    group = new_group()
    return lambda: funcol.all_reduce(torch.ones(6, 4), "sum", group).sum()


def view_of_pending(rank: int, world: int, new_group: NewGroup) -> Step:
    group = new_group()
    return lambda: funcol.all_gather_tensor(torch.ones(6, 4), 0, group).view(-1)[1:].tolist()


def three_redistributions(rank: int, world: int, new_group: NewGroup) -> Step:
    mesh = line_mesh(world, new_group)
    dtensor = DTensor.from_local(torch.ones(8, 12), mesh, [Partial()])
    placements: list[Placement] = [Shard(0), Shard(1), Replicate()]

    def step() -> object:
        moved = dtensor
        for placement in placements:
            moved = funcol.redistribute(moved, placements=[placement])
        return moved.to_local().sum()

    return step


def three_steps(rank: int, world: int, new_group: NewGroup) -> Step:
    """Returns a reduce_scatter along a row, the change to a partial maximum, an all_to_all along a column."""
    mesh = square_mesh(rank, new_group)
    source, target = [Shard(1), Partial()], [Shard(0), Partial("max")]
    plan = funcol.plan_redistribution(source, target, mesh, (8, 12), torch.float32)
    assert [one.kind for one in plan.steps] == ["reduce_scatter", "embed", "all_to_all"], plan
    dtensor = DTensor.from_local(torch.ones(8, 6), mesh, source)
    return lambda: funcol.redistribute(dtensor, placements=target).to_local().sum()


def redistribute_many(rank: int, world: int, new_group: NewGroup) -> Step:
    mesh = line_mesh(world, new_group)
    dtensors = [DTensor.from_local(torch.ones(size, 3), mesh, [Shard(0)]) for size in (2, 4, 6)]

    def step() -> object:
        return [one.to_local().sum() for one in funcol.redistribute_many(dtensors, [Replicate()])]

    return step


def tensor_parallel(rank: int, world: int, new_group: NewGroup) -> Step:
    mesh = line_mesh(world, new_group)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)
    )
    parts = {name: ColwiseParallel() if name in "03" else RowwiseParallel() for name in "0235"}
    parallelize_module(model, mesh, parts)
    x = torch.ones(3, 4, requires_grad=True)

    def step() -> object:
        x.grad = None
        model(x).sum().backward()
        assert x.grad is not None
        return x.grad.tolist()

    return step


def fsdp2(rank: int, world: int, new_group: NewGroup) -> Step:
    model = sharded(blocks(), mesh=line_mesh(world, new_group))

    def step() -> object:
        model.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        return [p.grad.to_local().sum().item() for p in model.parameters() if isinstance(p.grad, DTensor)]

    return step


def local_map(rank: int, world: int, new_group: NewGroup) -> Step:
    mesh = line_mesh(world, new_group)
    weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])

    @funcol.local_map.apply_local_map(out_placements=[Replicate()], in_placements=([Shard(0)],))
    def whole_sum(local: Tensor) -> Tensor:
        return funcol.all_reduce(local.sum(0) + 1, "sum", (mesh, 0)) * 2

    return lambda: whole_sum(weight).to_local().tolist()


def compiled_region(rank: int, world: int, new_group: NewGroup) -> Step:
    group = new_group()

    @torch.compile(fullgraph=True)
    def region(x: Tensor) -> Tensor:
        own = funcol.all_gather_tensor(x * 2, 0, group) + 1
        return funcol.reduce_scatter_tensor(own, "sum", 0, group).cos()

    return lambda: region(torch.ones(4, 4)).sum().item()


PROGRAMS: dict[str, Program] = {
    "pending_collective": Program(pending_collective, 0),
    "view": Program(view_of_pending, 0),
    "three_redistributions": Program(three_redistributions, 1),
    # The failing rank's row waits for it, and both columns for its row.
    "three_steps": Program(three_steps, 0, worlds=(4,)),
    "redistribute_many": Program(redistribute_many, 0),
    "tensor_parallel": Program(tensor_parallel, 2),
    "fsdp2_forward": Program(fsdp2, 1),
    "fsdp2_backward": Program(fsdp2, 5),
    "local_map": Program(local_map, 0),
    "compiled": Program(compiled_region, 1),
}
