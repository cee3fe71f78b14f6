"""Collectives as functions of one tensor, for tests of their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from differential import sample, world_group
from torch import Tensor

import funcol

Function = Callable[[Tensor], Tensor]


def splits(world: int) -> list[int]:
    """Uneven sizes, one of them 0 from three ranks on: 1, 3, 0, 2, ..."""
    return [[1, 3, 0, 2][rank % 4] for rank in range(world)]


def _coalesced(index: int, result: list[Tensor]) -> Tensor:
    return result[index]


# name: (shape of the input on a rank of a world, the function of the input)
Case = tuple[Callable[[int, int], tuple[int, ...]], Callable[[Tensor, int], Tensor]]


def _same(*shape: int) -> Callable[[int, int], tuple[int, ...]]:
    return lambda rank, world: shape


LINEAR: dict[str, Case] = {
    "all_reduce sum": (_same(2, 3), lambda x, w: funcol.all_reduce(x, "sum", world_group())),
    "all_reduce avg": (_same(2, 3), lambda x, w: funcol.all_reduce(x, "avg", world_group())),
    "all_reduce sum, 0-dim": (_same(), lambda x, w: funcol.all_reduce(x, "sum", world_group())),
    "all_reduce sum, empty": (_same(0, 3), lambda x, w: funcol.all_reduce(x, "sum", world_group())),
    "all_reduce sum, transposed": (_same(2, 3), lambda x, w: funcol.all_reduce(x.t(), "sum", world_group())),
    "all_gather dim 0": (_same(2, 3), lambda x, w: funcol.all_gather_tensor(x, 0, world_group())),
    "all_gather dim 1": (_same(2, 3), lambda x, w: funcol.all_gather_tensor(x, 1, world_group())),
    "all_gather last dim": (_same(2, 1, 2), lambda x, w: funcol.all_gather_tensor(x, -1, world_group())),
    "all_gather 0-dim": (_same(), lambda x, w: funcol.all_gather_tensor(x, 0, world_group())),
    "all_gather uneven dim 0": (
        lambda rank, world: (splits(world)[rank], 2),
        lambda x, w: funcol.all_gather_tensor(x, 0, world_group(), split_sizes=splits(w)),
    ),
    "all_gather uneven dim 1": (
        lambda rank, world: (2, splits(world)[rank]),
        lambda x, w: funcol.all_gather_tensor(x, 1, world_group(), split_sizes=splits(w)),
    ),
    "reduce_scatter sum dim 0": (
        _same(6, 1),
        lambda x, w: funcol.reduce_scatter_tensor(x, "sum", 0, world_group()),
    ),
    "reduce_scatter sum dim 1": (
        _same(2, 6),
        lambda x, w: funcol.reduce_scatter_tensor(x, "sum", 1, world_group()),
    ),
    "reduce_scatter avg dim 1": (
        _same(1, 6),
        lambda x, w: funcol.reduce_scatter_tensor(x, "avg", 1, world_group()),
    ),
    "reduce_scatter sum uneven": (
        lambda rank, world: (2, sum(splits(world))),
        lambda x, w: funcol.reduce_scatter_tensor(x, "sum", 1, world_group(), split_sizes=splits(w)),
    ),
    "reduce_scatter avg uneven": (
        lambda rank, world: (sum(splits(world)),),
        lambda x, w: funcol.reduce_scatter_tensor(x, "avg", 0, world_group(), split_sizes=splits(w)),
    ),
    "all_to_all equal": (_same(6, 2), lambda x, w: funcol.all_to_all_single(x, None, None, world_group())),
    "all_to_all splits": (
        # rank r sends r rows to itself and s + 1 rows to any other rank s
        lambda rank, world: (sum(rank if s == rank else s + 1 for s in range(world)), 2),
        lambda x, w: funcol.all_to_all_single(
            x,
            [dist.get_rank() + (0 if s == dist.get_rank() else 1) for s in range(w)],
            [dist.get_rank() if s == dist.get_rank() else s + 1 for s in range(w)],
            world_group(),
        ),
    ),
    "all_to_all of a list": (
        # rank r sends s + 1 rows to any rank s
        lambda rank, world: (sum(range(world + 1)), 2),
        lambda x, w: torch.cat(
            funcol.all_to_all(list(x.split(list(range(1, w + 1)))), [dist.get_rank() + 1] * w, world_group())
        ),
    ),
    "one of all_to_all of a list": (
        _same(3, 2),
        lambda x, w: funcol.all_to_all([x * (r + 1) for r in range(w)], None, world_group())[0],
    ),
    "broadcast": (_same(2, 3), lambda x, w: funcol.broadcast(x, w - 1, world_group())),
    "permute ring": (
        _same(2, 3),
        lambda x, w: funcol.permute_tensor(x, [(r + 1) % w for r in range(w)], world_group()),
    ),
    "permute of 0-dim tensors": (
        _same(),
        lambda x, w: funcol.permute_tensor(x, [(r + 1) % w for r in range(w)], world_group()),
    ),
    "permute all to one rank": (
        _same(2, 2),
        lambda x, w: funcol.permute_tensor(x, [0] * w, world_group()),
    ),
    "permute from the first rank alone": (
        _same(2, 2),
        lambda x, w: funcol.permute_tensor(x, [w - 1], world_group()),
    ),
    "reduce sum": (_same(2, 3), lambda x, w: funcol.reduce(x, "sum", w - 1, world_group())),
    "reduce avg": (_same(2, 3), lambda x, w: funcol.reduce(x, "avg", 0, world_group())),
    "scatter": (_same(6, 2), lambda x, w: funcol.scatter(x, w - 1, 0, world_group())),
    "scatter uneven dim 1": (
        lambda rank, world: (2, sum(splits(world))),
        lambda x, w: funcol.scatter(x, 0, 1, world_group(), split_sizes=splits(w)),
    ),
    "gather": (_same(2, 3), lambda x, w: funcol.gather(x, w - 1, 0, world_group())),
    "gather uneven dim 1": (
        lambda rank, world: (2, splits(world)[rank]),
        lambda x, w: funcol.gather(x, 0, -1, world_group(), split_sizes=splits(w)),
    ),
    "all_reduce_coalesced": (
        _same(2, 3),
        lambda x, w: torch.cat(
            [y.flatten() for y in funcol.all_reduce_coalesced([x, 2 * x[0]], "sum", world_group())]
        ),
    ),
    "all_reduce_coalesced avg, one result unused": (
        _same(2, 3),
        lambda x, w: _coalesced(1, funcol.all_reduce_coalesced([3 * x, 2 * x], "avg", world_group())),
    ),
    "all_gather_into_tensor_coalesced": (
        _same(2, 3),
        lambda x, w: torch.cat(
            [y.flatten() for y in funcol.all_gather_into_tensor_coalesced([x, x[0, 0]], world_group())]
        ),
    ),
    "all_gather_into_tensor_coalesced of two dtypes": (
        _same(2, 3),
        lambda x, w: torch.cat(
            [
                y.flatten().double()
                for y in funcol.all_gather_into_tensor_coalesced([x, x.to(torch.complex128)], world_group())
            ]
        ),
    ),
    "reduce_scatter_tensor_coalesced": (
        _same(6, 6),
        lambda x, w: torch.cat(
            [
                y.flatten()
                for y in funcol.reduce_scatter_tensor_coalesced([x, 2 * x], "avg", [0, 1], world_group())
            ]
        ),
    ),
    "wait_tensor": (
        _same(2, 3),
        lambda x, w: funcol.wait_tensor(funcol.all_reduce(x, "sum", world_group())),
    ),
    "through views of a pending result": (
        _same(2, 3),
        lambda x, w: funcol.all_reduce(x, "sum", world_group()).t().reshape(-1)[1:].view(-1, 1),
    ),
    "torch.ops.funcol.all_reduce": (
        _same(2, 3),
        lambda x, w: torch.ops.funcol.all_reduce(x, "sum", world_group().group_name),
    ),
    "torch.ops.funcol.all_gather_into_tensor": (
        _same(2, 3),
        lambda x, w: torch.ops.funcol.all_gather_into_tensor(x, w, world_group().group_name),
    ),
    "torch.ops.funcol.reduce_scatter_tensor": (
        _same(6, 3),
        lambda x, w: torch.ops.funcol.reduce_scatter_tensor(x, "avg", w, world_group().group_name),
    ),
    "torch.ops.funcol.broadcast": (
        _same(2, 3),
        lambda x, w: torch.ops.funcol.broadcast(x, 0, world_group().group_name),
    ),
}

NONLINEAR: dict[str, Case] = {
    "all_reduce max": (_same(2, 3), lambda x, w: funcol.all_reduce(x, "max", world_group())),
    "all_reduce min": (_same(2, 3), lambda x, w: funcol.all_reduce(x, "min", world_group())),
    "all_reduce product": (_same(2, 3), lambda x, w: funcol.all_reduce(x, "product", world_group())),
    "reduce_scatter max": (
        _same(6, 2),
        lambda x, w: funcol.reduce_scatter_tensor(x, "max", 0, world_group()),
    ),
    "reduce_scatter max dim 1": (
        _same(2, 6),
        lambda x, w: funcol.reduce_scatter_tensor(x, "max", 1, world_group()),
    ),
    "reduce_scatter product": (
        _same(6),
        lambda x, w: funcol.reduce_scatter_tensor(x, "product", 0, world_group()),
    ),
    "reduce_scatter min uneven": (
        lambda rank, world: (sum(splits(world)),),
        lambda x, w: funcol.reduce_scatter_tensor(x, "min", 0, world_group(), split_sizes=splits(w)),
    ),
    "reduce max": (_same(2, 3), lambda x, w: funcol.reduce(x, "max", w - 1, world_group())),
    "reduce product": (_same(3), lambda x, w: funcol.reduce(x, "product", 0, world_group())),
    "all_reduce_coalesced min": (
        _same(2, 3),
        lambda x, w: torch.cat(
            [y.flatten() for y in funcol.all_reduce_coalesced([x, x[0] - 1], "min", world_group())]
        ),
    ),
    "reduce_scatter_tensor_coalesced max": (
        _same(6, 6),
        lambda x, w: torch.cat(
            [
                y.flatten()
                for y in funcol.reduce_scatter_tensor_coalesced([x, 2 - x], "max", [0, 1], world_group())
            ]
        ),
    ),
}

CASES = LINEAR | NONLINEAR


def total(local: Tensor) -> float:
    """Returns the sum of ``local`` over all ranks, by c10d."""
    summed = local.detach().clone()
    dist.all_reduce(summed)
    return float(summed)


def finite_differences(function: Function, x: Tensor, weights: Tensor, rank: int, world: int) -> Tensor:
    """d/dx of the sum over all ranks of <weights, function(x)>, one element of one rank's x at a time."""
    step = 1e-6
    gradient = torch.zeros_like(x)
    for other in range(world):
        count = torch.tensor(x.numel())
        dist.broadcast(count, other)
        for index in range(int(count)):
            values = []
            for sign in (1, -1):
                moved = x.detach().clone()
                if other == rank:
                    moved.view(-1)[index] += sign * step
                values.append(total((function(moved).detach() * weights).sum()))
            if other == rank:
                gradient.view(-1)[index] = (values[0] - values[1]) / (2 * step)
    return gradient


def case_on(rank: int, world: int, name: str) -> tuple[Function, Tensor, Tensor]:
    """Returns the case's function, its input and a weight for each element of the result."""
    shape, function = CASES[name]
    x = sample(rank, shape(rank, world), torch.float64)
    weights = sample(rank + 10, function(x, world).shape, torch.float64)
    return lambda x: function(x, world), x, weights
