"""All forms of a collective send the same bytes in the same order, so any mix of ranks gets its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from differential import DIMS, PROGRAMS, assert_plain, assert_same, sample, world_group
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_settings import checked
from rank_mixes import WAYS, mixed
from ranks import on_ranks, run_ranks
from torch import Tensor
from torch.utils._pytree import tree_leaves
from uneven_collectives import COLLECTIVES, SIZES, Problem, each_collective, summands

import funcol

each_way = pytest.mark.parametrize("way", WAYS)

each_world = pytest.mark.parametrize("world", [2, 3])

WATCHED = {"first": [0], "last": [-1], "all but the first": [1, 2]}

each_watched = pytest.mark.parametrize("watched", WATCHED)


def others(watched: str, world: int) -> list[int]:
    return [rank % world for rank in WATCHED[watched]]


@pytest.mark.sampled(10)
@each_world
@each_way
@each_watched
@each_collective
@pytest.mark.parametrize("dim", [0, 1, -1])
@on_ranks()
def test_parts_of_any_sizes_arrive_in_any_mix(
    rank: int, world: int, name: str, dim: int, way: str, watched: str
) -> None:
    collective = COLLECTIVES[name]
    for sizes in SIZES.values():
        problem = Problem(sizes(world), dim=dim, root=world - 1)
        inputs = [summands(other, collective.shape(problem, other), torch.int32) for other in range(world)]

        def program(x: Tensor, problem: Problem = problem) -> Tensor:
            return collective.call(x, problem, world_group(), problem.sizes)

        result = mixed(program, way, rank, others(watched, world))(inputs[rank])
        assert_plain(result, collective.result(inputs, rank, problem).contiguous())


@each_world
@each_collective
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bool], ids=str)
@on_ranks()
def test_parts_of_any_dtype_arrive_in_any_mix(rank: int, world: int, name: str, dtype: torch.dtype) -> None:
    collective = COLLECTIVES[name]
    problem = Problem(SIZES["odd"](world), root=world - 1)
    inputs = [summands(other, collective.shape(problem, other), dtype) for other in range(world)]
    if dtype == torch.bool and name in ("reduce", "reduce_scatter_tensor"):
        inputs = [x & (index == 0) for index, x in enumerate(inputs)]  # one True makes a sum
    if dtype == torch.complex64:
        inputs = [x.conj() for x in inputs]
    program: Callable[[Tensor], Tensor] = lambda x: collective.call(  # noqa: E731
        x, problem, world_group(), problem.sizes
    )
    result = mixed(program, "mode", rank, [0])(inputs[rank])
    assert_plain(result, collective.result(inputs, rank, problem).resolve_conj().contiguous())


class Move(NamedTuple):
    """A collective of drawn parts, which some ranks run under a mode."""

    name: str
    problem: Problem
    dtype: torch.dtype
    is_strided: bool
    watched: frozenset[int]


@st.composite
def moves(draw: st.DrawFn) -> Move:
    world = 3
    problem = Problem(
        draw(st.lists(st.integers(0, 5), min_size=world, max_size=world)),
        draw(st.integers(-3, 2)),
        draw(st.integers(0, world - 1)),
        draw(st.tuples(*[st.integers(0, 4)] * 3)),
    )
    return Move(
        draw(st.sampled_from(sorted(COLLECTIVES))),
        problem,
        draw(st.sampled_from([torch.int32, torch.float64, torch.complex64])),
        draw(st.booleans()),
        draw(st.frozensets(st.integers(0, world - 1), min_size=1, max_size=world - 1)),
    )


def arrives(rank: int, world: int, move: Move) -> None:
    collective, problem = COLLECTIVES[move.name], move.problem
    inputs = [summands(other, collective.shape(problem, other), move.dtype) for other in range(world)]
    own = inputs[rank]
    if move.is_strided:
        own = torch.stack([own, own], -1)[..., 0]
    result = mixed(
        lambda x: collective.call(x, problem, world_group(), problem.sizes), "mode", rank, list(move.watched)
    )(own)
    assert_plain(result, collective.result(inputs, rank, problem).contiguous())


@checked(40)
@given(moves())
def test_drawn_parts_arrive_in_any_mix(move: Move) -> None:
    run_ranks(arrives, 3, move)


@pytest.mark.long
@checked(1500)
@given(moves())
def test_many_drawn_parts_arrive_in_any_mix(move: Move) -> None:
    run_ranks(arrives, 3, move)


@pytest.mark.sampled(8)
@each_world
@each_way
@each_watched
@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks()
def test_equal_parts_arrive_in_any_mix(rank: int, world: int, name: str, way: str, watched: str) -> None:
    x = sample(rank, (12, 12))
    for dim in DIMS.get(name, [None]):
        options: dict[str, Any] = {} if dim is None else {"dim": dim}

        def program(x: Tensor, options: dict[str, Any] = options) -> Any:
            return PROGRAMS[name](funcol, x, world, world_group(), **options)

        expected = program(x)
        expected = list(expected) if isinstance(expected, (list, tuple)) else expected
        result = mixed(program, way, rank, others(watched, world))(x)
        assert_same(list(result) if isinstance(result, (list, tuple)) else result, expected)


# Calls of lists and of ranks that send or receive nothing: (input, rank, number of ranks) -> tensors.
CALLS: dict[str, Callable[[Tensor, int, int], Any]] = {
    "all_to_all": lambda x, rank, world: funcol.all_to_all(
        [x[: rank + other] for other in range(world)],
        [rank + other for other in range(world)],
        world_group(),
    ),
    "all_to_all_single": lambda x, rank, world: funcol.all_to_all_single(
        x[: world * rank], list(range(world)), [rank] * world, world_group()
    ),
    "all_to_all_single of complex numbers": lambda x, rank, world: funcol.all_to_all_single(
        torch.complex(x, x)[: world * rank], list(range(world)), [rank] * world, world_group()
    ),
    "permute to one rank": lambda x, rank, world: funcol.permute_tensor(x, [0] * world, world_group()),
    "permute of the first": lambda x, rank, world: funcol.permute_tensor(x, [world - 1], world_group()),
    "permute without dims": lambda x, rank, world: funcol.permute_tensor(
        x[0, 0], [(other + 1) % world for other in range(world)], world_group()
    ),
    "broadcast of a transposed": lambda x, rank, world: funcol.broadcast(x.t(), world - 1, world_group()),
    "all_gather without dims": lambda x, rank, world: funcol.all_gather_tensor(x[0, 0], 0, world_group()),
    "coalesced of several shapes": lambda x, rank, world: funcol.all_gather_into_tensor_coalesced(
        [x.t(), x[:0], x[0, 0]], world_group()
    ),
    "all_reduce avg": lambda x, rank, world: funcol.all_reduce(x, "avg", world_group()),
    "reduce max": lambda x, rank, world: funcol.reduce(x, "max", world - 1, world_group()),
}


@pytest.mark.sampled(4)
@each_world
@each_way
@pytest.mark.parametrize("name", CALLS)
@on_ranks()
def test_ranks_that_send_unlike_amounts_agree_in_any_mix(rank: int, world: int, name: str, way: str) -> None:
    x = sample(rank, (9, 3))
    call = CALLS[name]
    expected = call(x, rank, world)
    result = mixed(lambda x: call(x, rank, world), way, rank, [0])(x)
    for one, other in zip(tree_leaves(result), tree_leaves(expected), strict=True):
        assert torch.equal(one, other)


# In place: (input, number of ranks) -> the tensors that were written.
IN_PLACE: dict[str, Callable[[Tensor, int], Any]] = {
    "all_reduce": lambda x, world: funcol.all_reduce_inplace(x, "sum", world_group()),
    "all_gather": lambda x, world: funcol.all_gather_inplace(
        [torch.empty_like(x) for _ in range(world)], x, world_group()
    ),
    "reduce_scatter": lambda x, world: funcol.reduce_scatter_inplace(
        torch.empty_like(x), [x * other for other in range(world)], "sum", group=world_group()
    ),
}


def in_place_forms_agree(rank: int, world: int, name: str, way: str) -> None:
    x = sample(rank, (4, 3))
    expected = IN_PLACE[name](x.clone(), world)
    result = mixed(lambda x: IN_PLACE[name](x, world), way, rank, [0])(x.clone())
    for one, other in zip(tree_leaves(result), tree_leaves(expected), strict=True):
        assert torch.equal(one, other)


@each_world
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_forms_agree_in_any_mix(world: int, name: str) -> None:
    run_ranks(in_place_forms_agree, world, name, "mode")


@pytest.mark.sampled(4)
@each_world
@each_way
@each_collective
@on_ranks()
def test_gradients_agree_in_any_mix(rank: int, world: int, name: str, way: str) -> None:
    collective = COLLECTIVES[name]
    problem = Problem(SIZES["odd"](world), root=world - 1)
    x = summands(rank, collective.shape(problem, rank), torch.float64).requires_grad_()

    def program(x: Tensor) -> Tensor:
        result = collective.call(x, problem, world_group(), problem.sizes)
        return (result * torch.arange(result.numel(), dtype=result.dtype).view(result.shape)).sum()

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(run(x), x)[0]

    expected = gradient(program)
    if way == "mode":
        actual = mixed(lambda: gradient(program), way, rank, [0])()
    else:
        actual = gradient(mixed(program, way, rank, [0]))
    assert torch.equal(actual, expected)
