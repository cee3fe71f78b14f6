"""Under funcol.install(), DTensors on meshes whose ranks do not ascend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import sample, world_group
from ranks import device_type, run_ranks
from sharded import Layout, layouts, local_of, shard_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

import funcol

ON_DEVICES = True

Ranks = list[Any]

ONE_AXIS = layouts("R", "S0", "S1", "_S0/2", "Psum", "Pavg", "Pmax")
TWO_AXES = layouts(
    "R R", "S0 R", "R S1", "S0 S0", "S1 S0", "S1 S1", "_S0/2 S0", "Psum S0", "R Psum", "Psum Psum"
)
CASES = [
    *[([1, 0], layout) for layout in ONE_AXIS],
    *[([2, 0, 1], layout) for layout in ONE_AXIS],
    *[(ranks, layout) for ranks in ([[3, 1], [2, 0]], [[1, 0], [3, 2]]) for layout in TWO_AXES],
]
cases = pytest.mark.parametrize(("ranks", "layout"), CASES, ids=str)
shapes = pytest.mark.parametrize("shape", [(8, 6), (5, 7)], ids=str)


def world_of(ranks: Ranks) -> int:
    return torch.tensor(ranks).numel()


def source_rank(mesh: DeviceMesh, source: int) -> int:
    """Returns the rank that is number ``source`` of the group along each axis.

    A group counts as the world does, or as the mesh does where its backend splits it off ("nccl").
    """
    is_source = all(dist.get_rank(mesh.get_group(axis)) == source for axis in range(mesh.ndim))
    found = funcol.all_gather_tensor(torch.tensor([is_source]), 0, world_group())
    return int(found.nonzero())


def distributes(
    rank: int, world: int, ranks: Ranks, layout: Layout, shape: tuple[int, ...], source: int | None
) -> None:
    mesh = DeviceMesh(device_type(), ranks)
    whole = sample(0 if source is None else source_rank(mesh, source), shape)
    given = whole if source is None else sample(rank, shape)
    with funcol.installed():
        dtensor = distribute_tensor(given, mesh, layout.placements(), src_data_rank=source)
        if not any(word[0] == "P" for word in layout.words):
            assert torch.equal(
                dtensor.to_local(), shard_of(whole, layout, mesh.shape, mesh.get_coordinate() or ())
            )
        torch.testing.assert_close(dtensor.full_tensor(), whole)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("source", [0, 1, None])
@shapes
@cases
def test_distribute_tensor_cuts_along_the_mesh(
    ranks: Ranks, layout: Layout, shape: tuple[int, ...], source: int | None
) -> None:
    run_ranks(distributes, world_of(ranks), ranks, layout, shape, source)


def gathers(rank: int, world: int, ranks: Ranks, layout: Layout, shape: tuple[int, ...]) -> None:
    mesh = DeviceMesh(device_type(), ranks)
    whole = sample(0, shape)
    coordinate = mesh.get_coordinate() or ()
    local = local_of(whole, layout, mesh.shape, coordinate)
    expected = whole
    replicated = Layout(("R",) * mesh.ndim).placements()
    with funcol.installed():
        x = DTensor.from_local(local, mesh, layout.placements(), shape=whole.shape, stride=whole.stride())
        torch.testing.assert_close(x.full_tensor(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            x.redistribute(placements=replicated).to_local(), expected, rtol=1e-4, atol=1e-4
        )
        cut = Layout(("S1",) * mesh.ndim)
        moved = x.redistribute(placements=cut.placements())
        torch.testing.assert_close(
            moved.to_local(), shard_of(expected, cut, mesh.shape, coordinate), rtol=1e-4, atol=1e-4
        )


@pytest.mark.sampled(4)
@shapes
@cases
def test_what_from_local_wraps_is_gathered_along_the_mesh(
    ranks: Ranks, layout: Layout, shape: tuple[int, ...]
) -> None:
    run_ranks(gathers, world_of(ranks), ranks, layout, shape)


def trains(rank: int, world: int, ranks: Ranks) -> None:
    mesh = DeviceMesh(device_type(), ranks)
    x, weight = sample(0, (8, 6)), sample(1, (6, 4))
    plain = weight.clone().requires_grad_()
    (x @ plain).square().sum().backward()
    with funcol.installed():
        given = distribute_tensor(x, mesh, Layout(("S0",)).placements())
        leaf = distribute_tensor(weight, mesh, Layout(("S1",)).placements()).requires_grad_()
        (given @ leaf).square().sum().backward()
        assert isinstance(leaf.grad, DTensor)
        assert plain.grad is not None
        torch.testing.assert_close(leaf.grad.full_tensor(), plain.grad)


def test_operators_and_gradients_follow_the_mesh() -> None:
    run_ranks(trains, 2, [1, 0])
