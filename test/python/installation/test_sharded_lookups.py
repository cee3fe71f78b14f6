"""Lookups in row-sharded tensors under ``funcol.install()``: the result is an ordinary partial sum."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from ranks import on_ranks
from sharded import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from twins import as_on_plain_tensors

import funcol

ROWS, DIM = 11, 4


def table() -> Tensor:
    return torch.arange(ROWS * DIM, dtype=torch.float64).reshape(ROWS, DIM) % 7


def indices() -> Tensor:
    return torch.tensor([[0, 3, 10], [7, 3, 1]])


def sharded(tensor: Tensor) -> DTensor:
    return distribute_tensor(tensor, mesh_of((2,)), [Shard(0)])


def replicated(tensor: Tensor) -> DTensor:
    return distribute_tensor(tensor, mesh_of((2,)), [Replicate()])


def used_twice(weight: Tensor, index: Tensor) -> Tensor:
    found = nn.functional.embedding(index, weight)
    return nn.functional.layer_norm(found, (DIM,)) + found * 2


def reduced_twice(weight: Tensor, index: Tensor) -> Tensor:
    found = nn.functional.embedding(index, weight)
    if isinstance(found, DTensor):
        return found.redistribute(placements=[Replicate()]) + found.redistribute(placements=[Shard(0)])
    return found + found


def two_alive(weight: Tensor, index: Tensor) -> Tensor:
    first, second = nn.functional.embedding(index, weight), nn.functional.embedding(index.flip(0), weight)
    return second * first + first


def tied_weights(weight: Tensor, index: Tensor) -> Tensor:
    return nn.functional.linear(torch.tanh(nn.functional.embedding(index, weight)), weight)


def flattened(weight: Tensor, index: Tensor) -> Tensor:
    return nn.functional.linear(nn.functional.embedding(index, weight).view(-1, DIM), weight)


def an_unused_one_before(weight: Tensor, index: Tensor) -> Tensor:
    nn.functional.embedding(index.flip(1), weight)
    return nn.functional.embedding(index, weight)


def gathered_twice(weight: Tensor, index: Tensor) -> Tensor:
    along = index[:, :DIM]
    return torch.gather(weight, 0, along) * 2 + torch.gather(weight, 0, along.flip(1))


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    program.__name__: program
    for program in (
        used_twice,
        reduced_twice,
        two_alive,
        tied_weights,
        flattened,
        an_unused_one_before,
        gathered_twice,
    )
}


def table_and_indices() -> list[Tensor]:
    return [table(), indices()]


@pytest.mark.parametrize("name", PROGRAMS)
@as_on_plain_tensors(table_and_indices, words=("S0", "R"), backward=True)
def test_program(weight: Tensor, index: Tensor, *, name: str) -> Tensor:
    return PROGRAMS[name](weight, index)


@pytest.mark.parametrize("name", PROGRAMS)
@as_on_plain_tensors(table_and_indices, words=("S0", "R"), backward=True, compiles={"fullgraph": True})
def test_compiled_program(weight: Tensor, index: Tensor, *, name: str) -> Tensor:
    return PROGRAMS[name](weight, index)


@on_ranks(2)
def test_result_is_a_partial_sum_that_copies_and_pickles(rank: int, world: int) -> None:
    with funcol.installed():
        found = nn.functional.embedding(replicated(indices()), sharded(table()))
        assert found.placements == (Partial("sum"),)
        saved = io.BytesIO()
        torch.save(found, saved)
        saved.seek(0)
        expected = nn.functional.embedding(indices(), table())
        for one in (copy.deepcopy(found), torch.load(saved, weights_only=False), found, found):
            assert torch.equal(one.full_tensor(), expected)


@pytest.mark.parametrize("words", [("S0 R", "R R"), ("R S0", "R R"), ("S0 S1", "R R"), ("S0 S0", "R R")])
@as_on_plain_tensors(table_and_indices)
def test_two_mesh_axes(weight: Tensor, index: Tensor) -> Tensor:
    found = nn.functional.embedding(index, weight)
    return found + found
