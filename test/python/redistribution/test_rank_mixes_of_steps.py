"""All forms of a redistribution step send the same bytes, so any mix of ranks gets its result."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from against_full_tensor import Item, local_differences, redistribution_errors
from rank_mixes import mixed, under_a_mode
from ranks import on_ranks, run_ranks
from sharded import Layout, layouts, local_of, mesh_of, placed, shard_of, whole_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from funcol import redistribute, redistribute_many

SHAPES = [(7, 5), (5, 4), (1, 7), (0, 4), (6, 6)]

ONE_AXIS = layouts("R", "S0", "S1", "_S0/2", "_S1/3", "Psum", "Pavg", "Pmax")

TWO_AXES = layouts("R R", "S0 R", "S0 S0", "S1 S1", "S0 S1", "_S1/2 S1", "R S1", "Psum R", "Psum S1")


def errors_of_single(
    rank: int, world: int, mesh_shape: tuple[int, ...], chosen: list[Layout], watched: list[int]
) -> list[str]:
    mesh = mesh_of(mesh_shape)
    wrong = []
    for shape, src, dst in itertools.product(SHAPES, chosen, chosen):
        call = mixed(local_differences, "mode", rank, watched)
        if found := call(mesh, src, dst, whole_of(shape, torch.float64)):
            wrong.append(f"rank {rank}, {shape} {src} -> {dst}: {found}")
    return wrong


MESHES = [((2,), ONE_AXIS), ((3,), ONE_AXIS), ((2, 2), TWO_AXES)]

each_mesh = pytest.mark.parametrize(("mesh_shape", "chosen"), MESHES, ids=["2", "3", "2x2"])

each_watched = pytest.mark.parametrize("watched", [[0], [1, 2]], ids=str)


@pytest.mark.sampled(3)
@each_mesh
@each_watched
def test_single_tensors_arrive_in_any_mix(
    mesh_shape: tuple[int, ...], chosen: list[Layout], watched: list[int]
) -> None:
    world = torch.Size(mesh_shape).numel()
    assert [*itertools.chain(*run_ranks(errors_of_single, world, mesh_shape, chosen, watched))] == []


def errors_of_many(
    rank: int, world: int, mesh_shape: tuple[int, ...], items: list[Item], watched: list[int]
) -> list[str]:
    call: Any = mixed(redistribution_errors, "mode", rank, watched)
    return call(rank, world, mesh_shape, items)  # type: ignore[no-any-return]


@pytest.mark.sampled(3)
@each_mesh
@each_watched
def test_many_tensors_arrive_in_any_mix(
    mesh_shape: tuple[int, ...], chosen: list[Layout], watched: list[int]
) -> None:
    items: list[Item] = [
        (shape, torch.float64, src, dst) for shape, src, dst in itertools.product(SHAPES, chosen, chosen)
    ]
    world = torch.Size(mesh_shape).numel()
    assert [*itertools.chain(*run_ranks(errors_of_many, world, mesh_shape, items, watched))] == []


def compiled_agrees(rank: int, world: int, pairs: list[tuple[Layout, Layout]], is_many: bool) -> None:
    mesh = mesh_of((world,))
    wholes = [whole_of(shape, torch.float32) for shape in SHAPES[:2]]
    for src, dst in pairs:
        placements = dst.placements()

        def program(*tensors: DTensor, placements: Any = placements) -> list[Tensor]:
            if is_many:
                return [one.to_local() for one in redistribute_many([*tensors], placements)]
            return [redistribute(one, mesh, placements).to_local() for one in tensors]

        held = [placed(whole, src, mesh) for whole in wholes]
        results = mixed(program, "compiled", rank, [0])(*held)
        for whole, result in zip(wholes, results, strict=True):
            assert torch.equal(result, shard_of(whole, dst, mesh.shape, (rank,))), f"{src} -> {dst}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("is_many", [False, True], ids=["single", "many"])
def test_compiled_ranks_agree_with_eager_ones(world: int, is_many: bool) -> None:
    one, two = Layout(("S1",)), Layout(("S0",))
    whole, partial = Layout(("R",)), Layout(("Psum",))
    pairs = [(one, whole), (two, whole), (one, two), (partial, one), (partial, whole)]
    run_ranks(compiled_agrees, world, pairs, is_many)


@on_ranks(2)
def test_gradients_of_many_tensors_agree_in_any_mix(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    wholes = [whole_of(shape, torch.float64) for shape in SHAPES[:2]]

    def gradients() -> list[Tensor]:
        src, dst = Layout(("S1",)), Layout(("S0",))
        leaves = [
            DTensor(local_of(x, src, mesh.shape, (rank,)), src.spec(mesh, x), requires_grad=True)  # type: ignore[call-arg]
            for x in wholes
        ]
        moved = redistribute_many(leaves, dst.placements())
        total = sum((one.to_local() * (rank + 1)).sum() for one in moved)
        assert isinstance(total, Tensor)
        total.backward()
        return [leaf.grad.to_local() for leaf in leaves if isinstance(leaf.grad, DTensor)]

    expected = gradients()
    actual = under_a_mode(gradients)() if rank == 0 else gradients()
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
