"""Collectives with a root: reduce, gather and scatter."""

from __future__ import annotations

import pytest
import torch
from differential import (
    REDUCTIONS,
    WORLDS,
    assert_plain,
    bits,
    small_sample,
    world_group,
)
from ranks import on_ranks, run_ranks
from uneven_collectives import (
    COLLECTIVES,
    ROOTED,
    SIZES,
    Problem,
    assert_close,
    moves_parts,
    reduced,
    summands,
)

import funcol

ON_DEVICES = True

each_world = pytest.mark.parametrize("world", WORLDS)


@pytest.mark.parametrize(("world", "root"), [(world, root) for world in WORLDS for root in range(world)])
@pytest.mark.parametrize("name", ROOTED)
@pytest.mark.parametrize("sizes", ["odd", "with 0", "last has all"])
def test_each_rank_can_be_the_root(world: int, root: int, name: str, sizes: str) -> None:
    run_ranks(moves_parts, world, name, sizes, {"root": root})


@each_world
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.complex64], ids=str)
@pytest.mark.parametrize("sizes", ["odd", "with 0"])
@on_ranks()
def test_scatter_takes_an_expanded_scalar_on_ranks_that_send_nothing(
    rank: int, world: int, dtype: torch.dtype, sizes: str
) -> None:
    problem = Problem(SIZES[sizes](world), root=world - 1)
    shape = problem.whole(rank)
    inputs = [small_sample(problem.root, shape, dtype)] * world
    own = inputs[0] if rank == problem.root else torch.empty((), dtype=dtype).expand(shape)
    result = funcol.scatter(own, problem.root, problem.dim, world_group(), split_sizes=problem.sizes)
    assert_plain(result, COLLECTIVES["scatter"].result(inputs, rank, problem).contiguous())


# Reductions


def reduces(
    rank: int, world: int, dst: int, dtype: torch.dtype, reduce_op: str, shape: tuple[int, ...]
) -> None:
    inputs = [summands(peer, shape, dtype) for peer in range(world)]
    before = bits(inputs[rank])
    result = funcol.reduce(inputs[rank], reduce_op, dst, world_group())
    assert funcol.is_pending(result)
    expected = reduced(inputs, reduce_op) if rank == dst else torch.zeros(shape, dtype=dtype)
    assert_close(result, expected, reduce_op)
    assert bits(inputs[rank]) == before


@pytest.mark.parametrize(("world", "dst"), [(1, 0), (2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize(("dtype", "reduce_op"), REDUCTIONS, ids=str)
def test_reduce_gives_its_destination_each_reduction(
    world: int, dst: int, dtype: torch.dtype, reduce_op: str
) -> None:
    run_ranks(reduces, world, dst, dtype, reduce_op, (3, 5))


@each_world
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 0, 3), (2, 3, 5)], ids=str)
def test_reduce_takes_each_shape(world: int, shape: tuple[int, ...]) -> None:
    run_ranks(reduces, world, world - 1, torch.float32, "sum", shape)
