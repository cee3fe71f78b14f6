"""Owners of whole tensors: how they are assigned, and how tensors move to them and back."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from ranks import device_type, on_ranks, run_ranks
from sharded import Layout, equals_whole, layouts, mesh_of, ordered, placed, whole_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import funcol
from funcol import redistribute_many
from funcol.redistribution import Owned, OwnedTensor, assign_owners

ON_DEVICES = True


def busiest(costs: list[float], owners: tuple[int, ...] | list[int], num_ranks: int) -> float:
    return max(
        sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank)
        for rank in range(num_ranks)
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_the_busiest_owner_is_within_four_thirds_of_the_best(num_ranks: int, seed: int) -> None:
    chosen = random.Random(seed)
    shapes = [(chosen.randint(1, 9), chosen.randint(1, 9)) for _ in range(chosen.randint(1, 7))]
    costs = [math.prod(shape) for shape in shapes]
    best = min(
        busiest(costs, owners, num_ranks) for owners in itertools.product(range(num_ranks), repeat=len(costs))
    )
    bound = 4 / 3 - 1 / (3 * num_ranks)
    assert busiest(costs, assign_owners(shapes, num_ranks), num_ranks) <= bound * best + 1e-9


def test_the_bound_is_reached() -> None:
    # Graham's example for two ranks: 4 + 2 and 3 + 3 are best.
    assert busiest([3, 3, 2, 2, 2], assign_owners([(3,), (3,), (2,), (2,), (2,)], 2), 2) == 7


def test_a_cost_of_the_callers_counts() -> None:
    shapes = [(1, 100), (10, 10), (10, 10)]
    owners = assign_owners(shapes, 2, cost=lambda shape: shape[0] ** 3)
    assert owners[1] != owners[2]
    assert busiest([1, 1000, 1000], owners, 2) == 1001


def test_wrong_arguments_of_an_assignment_are_refused() -> None:
    with pytest.raises(ValueError, match="num_ranks is 0"):
        assign_owners([(1,)], 0)
    with pytest.raises(ValueError, match="the cost of tensor 1 is nan"):
        assign_owners([(1,), (2,)], 2, cost=lambda shape: math.nan if shape == (2,) else 1)
    assert assign_owners([], 3) == []


ONE_AXIS = layouts("R", "S0", "S1", "_S0/2", "Psum", "Pavg")
TWO_AXES = [
    *layouts("R R", "S0 R", "S0 S0", "S0 S1", "S1 S0", "_S0/2 S0", "Psum S0", "Psum Psum"),
    ordered("S0 S0", (0, (1, 0))),
]
SHAPES = [(8, 12), (5, 3), (1, 7), (0, 4)]


def goes_and_comes(
    rank: int, world: int, mesh_shape: tuple[int, ...], chosen: list[Layout], async_op: bool
) -> None:
    mesh = mesh_of(mesh_shape)
    pairs = [(shape, src) for shape in SHAPES for src in chosen]
    wholes = [whole_of(shape, torch.float64) for shape, _ in pairs]
    tensors = [placed(whole, src, mesh) for whole, (_, src) in zip(wholes, pairs, strict=True)]
    owners = [index % world for index in range(len(tensors))]
    owned = redistribute_many(tensors, [Owned(owner) for owner in owners], async_op=async_op)
    for one, whole, owner in zip(owned, wholes, owners, strict=True):
        assert isinstance(one, OwnedTensor)
        assert one.shape == whole.shape
        assert one.whole is None if owner != rank else equals_whole(one.whole, whole)  # type: ignore[arg-type]
    changed = [one.with_whole(None if one.whole is None else one.whole + 1) for one in owned]
    back = [src for _, src in pairs if "P" not in str(src) and src.order is None]
    kept = [index for index, (_, src) in enumerate(pairs) if src in back]
    results = redistribute_many(
        [changed[index] for index in kept],
        [pairs[index][1].placements() for index in kept],
        async_op=async_op,
    )
    for index, result in zip(kept, results, strict=True):
        expected = placed(wholes[index] + 1, pairs[index][1], mesh)
        assert result.placements == expected.placements
        assert result.shape == expected.shape
        assert torch.equal(result.to_local(), expected.to_local()), pairs[index]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_layout_of_one_axis_goes_to_owners_and_back(world: int, async_op: bool) -> None:
    run_ranks(goes_and_comes, world, (world,), ONE_AXIS, async_op)


@pytest.mark.parametrize("async_op", [False, True])
def test_every_layout_of_two_axes_goes_to_owners_and_back(async_op: bool) -> None:
    run_ranks(goes_and_comes, 4, (2, 2), TWO_AXES, async_op)


def count(call: Callable[[], object]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return [event.name for event in profile.events() if event.name.startswith("c10d::")]


@on_ranks(2)
def test_each_way_is_one_collective(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    tensors = [distribute_tensor(torch.ones(index + 1, 3), mesh, [Shard(0)]) for index in range(50)]
    owners = [Owned(owner) for owner in assign_owners([tensor.shape for tensor in tensors], world)]
    owned = redistribute_many(tensors, owners)
    there = count(lambda: redistribute_many(tensors, owners))
    back = count(lambda: redistribute_many(owned, [Shard(0)]))
    assert [len(there), len(back)] == [1, 1]
    assert "alltoall" in there[0]
    assert "alltoall" in back[0]


@on_ranks(4)
def test_a_mesh_without_a_group_of_all_ranks_has_owners_too(rank: int, world: int) -> None:
    mesh = DeviceMesh(device_type(), [[3, 1], [0, 2]], mesh_dim_names=("a", "b"))
    ranks = mesh.mesh.flatten().tolist()
    whole = whole_of((5, 6), torch.float32)
    tensors = [placed(whole, layout, mesh) for layout in layouts("S0 S1", "S0 R", "R R", "S1 S0")]
    owned = redistribute_many(tensors, [Owned(index) for index in range(4)])
    for index, one in enumerate(owned):
        assert one.whole is None if ranks[index] != rank else torch.equal(one.whole, whole)  # type: ignore[arg-type]
    for tensor, result in zip(
        tensors, redistribute_many(owned, [t.placements for t in tensors]), strict=True
    ):
        assert torch.equal(result.to_local(), tensor.to_local())


def full_tensor(tensor: DTensor) -> Tensor:
    """Returns the full tensor by funcol: PyTorch 2.11 has no plan for strided shards."""
    return redistribute_many([tensor], [Replicate()])[0].to_local()


def gradients(rank: int, world: int, async_op: bool) -> None:
    """Through owners and back, beside the same on full tensors; a tensor in the middle needs no gradient."""
    mesh = mesh_of((world,))
    chosen = layouts("S0", "R", "Psum", "S1", "_S0/2")
    wholes = [whole_of((5, 4), torch.float64) / 10 + index for index in range(len(chosen))]
    tensors = [placed(whole, src, mesh) for whole, src in zip(wholes, chosen, strict=True)]
    needed = [index != 1 for index in range(len(chosen))]
    for tensor, whole, is_needed in zip(tensors, wholes, needed, strict=True):
        tensor.requires_grad_(is_needed)
        whole.requires_grad_(is_needed)
    owned = redistribute_many(
        tensors, [Owned(index % world) for index in range(len(chosen))], async_op=async_op
    )
    changed = [one.with_whole(None if one.whole is None else one.whole.sin()) for one in owned]
    results = redistribute_many(changed, [Replicate()], async_op=async_op)
    assert [result.requires_grad for result in results] == needed
    losses = [(result.to_local() ** 2).sum() for result in results]
    expected = [(whole.sin() ** 2).sum() for whole in wholes]
    inputs = [[one for one in side if one.requires_grad] for side in (tensors, wholes)]
    first, of_wholes = (
        torch.autograd.grad(sum(ends), given, create_graph=True)  # type: ignore[call-overload]
        for ends, given in zip((losses, expected), inputs, strict=True)
    )
    for gradient, tensor, other in zip(first, inputs[0], of_wholes, strict=True):
        assert gradient.placements == tuple(Replicate() if p.is_partial() else p for p in tensor.placements)
        torch.testing.assert_close(full_tensor(gradient), other)
    second, of_wholes = (
        torch.autograd.grad(sum((one**3).sum() for one in of_side), given)  # type: ignore[call-overload]
        for of_side, given in zip(([*map(full_tensor, first)], of_wholes), inputs, strict=True)
    )
    for gradient, other in zip(second, of_wholes, strict=True):
        torch.testing.assert_close(full_tensor(gradient), other)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_gradients_flow_through_owners(rank: int, world: int, async_op: bool) -> None:
    """Checks gradients with funcol's to_local: that of PyTorch 2.11 has no second gradient."""
    with funcol.installed():
        gradients(rank, world, async_op)


def funcol_partial() -> torch.distributed.tensor.Placement:
    return torch.distributed.tensor.Partial()


@on_ranks(2)
def test_wrong_owners_are_refused(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"Owned\(2\) is not a rank of the mesh, which has 2"):
        redistribute_many([rows], Owned(2))
    with pytest.raises(TypeError, match=r"target 1 is .* others are Owned"):
        redistribute_many([rows, rows], [Owned(0), [Replicate()]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="1 owners for 2 tensors"):
        redistribute_many([rows, rows], [Owned(0)])
    (owned,) = redistribute_many([rows], Owned(0))
    with pytest.raises(TypeError, match="tensor 1 is a DTensor, expected an OwnedTensor"):
        redistribute_many([owned, rows], [Shard(0)])
    if rank == 0:
        with pytest.raises(
            NotImplementedError, match="the whole of tensor 0 requires a gradient, which other"
        ):
            redistribute_many([owned.with_whole(torch.ones(4, 4, requires_grad=True))], [Shard(0)])
    with pytest.raises(NotImplementedError, match=r"and not to P\(sum\)"):
        redistribute_many([owned], [funcol_partial()])
    if rank == 0:
        with pytest.raises(ValueError, match="tensor 0 is owned here by rank 0 of the mesh, but is None"):
            redistribute_many([owned.with_whole(None)], [Shard(0)])
        with pytest.raises(ValueError, match=r"tensor 0 is Float \[3\], expected Float \[4, 4\]"):
            redistribute_many([owned.with_whole(torch.ones(3))], [Shard(0)])


@on_ranks(2)
def test_steps_are_made_again_when_they_were_forgotten(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    rows = distribute_tensor(whole_of((5, 4), torch.float32), mesh, [Shard(0)])
    for _ in range(2):
        (owned,) = redistribute_many([rows], Owned(1))
        (back,) = redistribute_many([owned], [Shard(0)])
        assert isinstance(back, DTensor)
        assert torch.equal(back.to_local(), rows.to_local())
        funcol._C.clear_tables()
