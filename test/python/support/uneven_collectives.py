"""Uneven gathers and scatters, and collectives with a root: calls, and results made from all inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import pytest
import torch
from differential import (
    DTYPES,
    assert_plain,
    bits,
    sample,
    small_sample,
    world_group,
)
from torch import Tensor

import funcol

# The result of each reduction on one rank, given the inputs of all.
REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def reduced(inputs: list[Tensor], reduce_op: str) -> Tensor:
    total = reduce(REDUCE[reduce_op], inputs)
    return total / len(inputs) if reduce_op == "avg" else total


def summands(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a :func:`sample` that every order of additions and multiplications reduces to the same bits."""
    x = sample(rank, shape, dtype)
    if x.is_complex():
        return torch.view_as_complex(small_numbers(torch.view_as_real(x)))
    return small_numbers(x) if x.is_floating_point() else x


def small_numbers(x: Tensor) -> Tensor:
    """Returns ``x`` rounded to small numbers other than 0, whose sign some reductions leave open."""
    x = x.round().clamp(-3, 3)
    return torch.where(x == 0, torch.ones_like(x), x)


# Sizes along the dim of interest: SIZES[name](number of ranks).
SIZES: dict[str, Callable[[int], list[int]]] = {
    "equal": lambda world: [2] * world,
    "odd": lambda world: [3, 1, 5][:world],
    "with 0": lambda world: [2, 0, 3][:world],
    "first has all": lambda world: [5] + [0] * (world - 1),
    "last has all": lambda world: [0] * (world - 1) + [4],
    "none has any": lambda world: [0] * world,
}


class Problem(NamedTuple):
    """A collective along a dim of 3-dim tensors; the whole has shape ``others`` but along ``dim``."""

    sizes: list[int]
    dim: int = 1
    root: int = 0
    others: tuple[int, int, int] = (2, 3, 4)

    def shape(self, size: int) -> tuple[int, ...]:
        shape = list(self.others)
        shape[self.dim] = size
        return tuple(shape)

    def whole(self, rank: int) -> tuple[int, ...]:
        return self.shape(sum(self.sizes))

    def shard(self, rank: int) -> tuple[int, ...]:
        return self.shape(self.sizes[rank])


def gathered_on_root(inputs: list[Tensor], rank: int, problem: Problem) -> Tensor:
    whole = torch.cat(inputs, problem.dim)
    return whole if rank == problem.root else whole.narrow(problem.dim, 0, 0)


def reduced_on_root(inputs: list[Tensor], rank: int, problem: Problem) -> Tensor:
    return reduced(inputs, "sum") if rank == problem.root else torch.zeros_like(inputs[rank])


class Collective(NamedTuple):
    shape: Callable[[Problem, int], tuple[int, ...]]
    """Shape of a rank's input."""
    call: Callable[[Tensor, Problem, Any, list[int] | None], Tensor]
    """The function, given its input, the group and split_sizes."""
    result: Callable[[list[Tensor], int, Problem], Tensor]
    """The result on a rank, given the inputs of all."""


COLLECTIVES = {
    "all_gather_tensor": Collective(
        Problem.shard,
        lambda x, problem, group, sizes: funcol.all_gather_tensor(x, problem.dim, group, split_sizes=sizes),
        lambda inputs, rank, problem: torch.cat(inputs, problem.dim),
    ),
    "reduce_scatter_tensor": Collective(
        Problem.whole,
        lambda x, problem, group, sizes: funcol.reduce_scatter_tensor(
            x, "sum", problem.dim, group, split_sizes=sizes
        ),
        lambda inputs, rank, problem: reduced(inputs, "sum").split(problem.sizes, problem.dim)[rank],
    ),
    "scatter": Collective(
        Problem.whole,
        lambda x, problem, group, sizes: funcol.scatter(
            x, problem.root, problem.dim, group, split_sizes=sizes
        ),
        lambda inputs, rank, problem: inputs[problem.root].split(problem.sizes, problem.dim)[rank],
    ),
    "gather": Collective(
        Problem.shard,
        lambda x, problem, group, sizes: funcol.gather(
            x, problem.root, problem.dim, group, split_sizes=sizes
        ),
        gathered_on_root,
    ),
    "reduce": Collective(
        Problem.whole,
        lambda x, problem, group, sizes: funcol.reduce(x, "sum", problem.root, group),
        reduced_on_root,
    ),
}

UNEVEN = [name for name in COLLECTIVES if name != "reduce"]

ROOTED = ["scatter", "gather", "reduce"]

MOVERS = ["all_gather_tensor", "scatter", "gather"]

each_collective = pytest.mark.parametrize("name", COLLECTIVES)

each_uneven = pytest.mark.parametrize("name", UNEVEN)


def run_and_compare(
    rank: int,
    name: str,
    problem: Problem,
    inputs: list[Tensor],
    group: Any = None,
    given_sizes: bool = True,
    own: Tensor | None = None,
) -> None:
    """Calls on this rank's input, or on ``own`` of the same value, and checks the result and the input."""
    collective = COLLECTIVES[name]
    x = inputs[rank] if own is None else own
    version = x._version
    result = collective.call(x, problem, group or world_group(), list(problem.sizes) if given_sizes else None)
    assert funcol.is_pending(result)
    assert_plain(result, collective.result(inputs, rank, problem).resolve_conj().resolve_neg().contiguous())
    assert x._version == version
    assert bits(x) == bits(inputs[rank])


def inputs_of(name: str, problem: Problem, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shape = COLLECTIVES[name].shape
    known = dtype in DTYPES
    make = summands if known else small_sample
    return [make(rank, shape(problem, rank), dtype) for rank in range(len(problem.sizes))]


def moves_parts(
    rank: int, world: int, name: str, sizes: str, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> None:
    problem = Problem(SIZES[sizes](world), **options)
    run_and_compare(rank, name, problem, inputs_of(name, problem, dtype))


def assert_close(actual: Tensor, expected: Tensor, reduce_op: str) -> None:
    """Same bits, but for averages: backends may divide before they add."""
    if reduce_op != "avg":
        assert_plain(actual, expected)
        return
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected)
