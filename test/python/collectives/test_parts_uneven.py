"""Gathers and scatters of parts of different sizes, by ``split_sizes``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from differential import (
    DTYPES,
    REDUCTIONS,
    WORLDS,
    assert_plain,
    sample,
    world_group,
)
from ranks import on_ranks, run_ranks
from uneven_collectives import (
    COLLECTIVES,
    MOVERS,
    SIZES,
    Problem,
    assert_close,
    each_collective,
    each_uneven,
    inputs_of,
    moves_parts,
    reduced,
    run_and_compare,
    summands,
)

import funcol

ON_DEVICES = True

each_world = pytest.mark.parametrize("world", WORLDS)

each_sizes = pytest.mark.parametrize("sizes", SIZES)


@pytest.mark.sampled(3)
@each_world
@each_uneven
@each_sizes
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_parts_of_each_size_are_gathered_and_scattered_along_each_dim(
    world: int, name: str, sizes: str, dim: int
) -> None:
    run_ranks(moves_parts, world, name, sizes, {"dim": dim})


@each_world
@each_collective
@pytest.mark.parametrize("others", [(0, 3, 4), (2, 3, 0), (1, 3, 5), (1, 3, 1)], ids=str)
def test_the_other_dims_can_have_any_size(world: int, name: str, others: tuple[int, int, int]) -> None:
    run_ranks(moves_parts, world, name, "with 0", {"others": others})


@pytest.mark.parametrize("world", [1, 2])
@each_collective
@on_ranks()
def test_a_tensor_can_have_one_dim(rank: int, world: int, name: str) -> None:
    shape = COLLECTIVES[name].shape
    problem = Problem([3, 0, 2][:world], dim=0)
    inputs = [sample(peer, shape(problem, peer)[:1]) for peer in range(world)]
    collective = COLLECTIVES[name]
    result = collective.call(inputs[rank], problem, world_group(), problem.sizes)
    assert_plain(result, collective.result(inputs, rank, problem))


@each_world
@each_collective
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@on_ranks()
def test_parts_are_equal_without_split_sizes(rank: int, world: int, name: str, dim: int) -> None:
    problem = Problem([2] * world, dim=dim)
    run_and_compare(rank, name, problem, inputs_of(name, problem), given_sizes=False)


@each_uneven
@on_ranks(2)
def test_split_sizes_can_be_a_tuple(rank: int, world: int, name: str) -> None:
    problem = Problem([3, 1])
    inputs = inputs_of(name, problem)
    collective = COLLECTIVES[name]
    sizes: Any = (3, 1)
    result = collective.call(inputs[rank], problem, world_group(), sizes)
    assert_plain(result, collective.result(inputs, rank, problem).contiguous())


# Dtypes


@each_world
@each_collective
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", ["odd", "with 0"])
def test_each_dtype_is_gathered_and_scattered(world: int, name: str, dtype: torch.dtype, sizes: str) -> None:
    run_ranks(moves_parts, world, name, sizes, {"root": world - 1}, dtype)


@each_world
@pytest.mark.parametrize("name", MOVERS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16, torch.complex128], ids=str)
@pytest.mark.parametrize("sizes", ["odd", "with 0", "none has any"])
def test_dtypes_that_gloo_does_not_know_are_moved(
    world: int, name: str, dtype: torch.dtype, sizes: str
) -> None:
    run_ranks(moves_parts, world, name, sizes, {"root": world - 1}, dtype)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("dtype", "reduce_op"), REDUCTIONS, ids=str)
@on_ranks()
def test_reduce_scatter_gives_uneven_parts_of_each_reduction(
    rank: int, world: int, dtype: torch.dtype, reduce_op: str
) -> None:
    sizes = [3, 0, 2][:world]
    inputs = [summands(peer, (2, sum(sizes)), dtype) for peer in range(world)]
    result = funcol.reduce_scatter_tensor(inputs[rank], reduce_op, 1, world_group(), split_sizes=sizes)
    assert_close(result, reduced(inputs, reduce_op).split(sizes, 1)[rank].contiguous(), reduce_op)


# Large sizes


@on_ranks(2, timeout=20)
def test_all_to_all_counts_more_rows_than_fit_in_32_bits(rank: int, world: int) -> None:
    rows = 2**31 + 8
    x = torch.empty(rows if rank == 0 else 0, 0)
    splits = ([0, 0], [0, rows]) if rank == 0 else ([rows, 0], [0, 0])
    result = funcol.all_to_all_single(x, *splits, world_group())
    assert result.shape == (0 if rank == 0 else rows, 0)


@each_collective
@on_ranks(2, timeout=20)
def test_parts_can_have_more_rows_than_fit_in_32_bits(rank: int, world: int, name: str) -> None:
    problem = Problem([1, 2**31 + 8], dim=0, others=(1, 0, 1))
    inputs = [torch.empty(COLLECTIVES[name].shape(problem, peer)) for peer in range(world)]
    result = COLLECTIVES[name].call(inputs[rank], problem, world_group(), problem.sizes)
    assert result.shape == COLLECTIVES[name].result(inputs, rank, problem).shape
