"""Calls of an operator that differ only in arguments that are no tensors are decided each for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from programs import mesh_of
from ranks import on_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import funcol

ON_DEVICES = True

Call = Callable[[Tensor], Tensor]


class Pair(NamedTuple):
    """Two calls on tensors of the same kind, the second of which must not be decided as the first."""

    first: Call
    second: Call
    placement: Placement
    shape: tuple[int, ...] = (2, 4, 6)


PAIRS = {
    "unsqueeze_copy": Pair(
        lambda x: torch.unsqueeze_copy(x, 3), lambda x: torch.unsqueeze_copy(x, 0), Shard(1)
    ),
    "transpose_copy": Pair(
        lambda x: torch.transpose_copy(x, 0, 2), lambda x: torch.transpose_copy(x, 1, 2), Shard(1)
    ),
    "permute_copy": Pair(
        lambda x: torch.permute_copy(x, (0, 1, 2)), lambda x: torch.permute_copy(x, (2, 1, 0)), Shard(0)
    ),
    "std_mean": Pair(
        lambda x: torch.std_mean(x, 0, correction=1)[0],
        lambda x: torch.std_mean(x, 0, correction=0)[0],
        Shard(0),
    ),
    "std_mean over another dim": Pair(
        lambda x: torch.std_mean(x, 2)[0], lambda x: torch.std_mean(x, 1)[0], Shard(0)
    ),
    "pdist, another norm": Pair(
        lambda x: torch.pairwise_distance(x, x + 1, p=1.0),
        lambda x: torch.pairwise_distance(x, x + 1, p=3.0),
        Shard(2),
    ),
    "div, rounded": Pair(
        lambda x: torch.div(x, 3.0, rounding_mode=None),
        lambda x: torch.div(x, 3.0, rounding_mode="floor"),
        Partial(),
    ),
    "sum in another dtype": Pair(lambda x: x.sum(), lambda x: x.sum(dtype=torch.float32), Shard(0)),
    "mean in another dtype": Pair(lambda x: x.mean(1), lambda x: x.mean(1, dtype=torch.float32), Shard(0)),
    "view as another dtype": Pair(
        lambda x: x.view(torch.int64), lambda x: x.view(torch.float64), Replicate()
    ),
    "histc, other bins": Pair(lambda x: x.histc(4, -8, 8), lambda x: x.histc(6, -8, 8), Replicate()),
}


def numbers(shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64).reshape(shape) * 7) % 11 - 5.25


def placed(shape: tuple[int, ...], placement: Placement, rank: int) -> DTensor:
    whole = numbers(shape)
    if placement.is_partial():
        return DTensor.from_local(whole if rank == 0 else whole * 0, mesh_of(2), [placement])
    return distribute_tensor(whole, mesh_of(2), [placement])


@pytest.mark.parametrize("name", PAIRS)
@on_ranks(2)
def test_another_argument_is_another_decision(rank: int, world: int, name: str) -> None:
    pair = PAIRS[name]
    with funcol.installed():
        for call in (pair.first, pair.second, pair.first):
            expected = call(numbers(pair.shape))
            result = call(placed(pair.shape, pair.placement, rank))
            assert isinstance(result, DTensor)
            assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
            torch.testing.assert_close(result.full_tensor(), expected)


@pytest.mark.parametrize("placement", [Replicate(), Shard(1), Shard(2), Partial()], ids=str)
@on_ranks(2)
def test_squeezing_in_place_changes_the_tensor(rank: int, world: int, placement: Placement) -> None:
    with funcol.installed():
        x = placed((1, 4, 6), placement, rank)
        assert x.squeeze_(0) is x
        expected = numbers((4, 6))
        assert x.shape == x._spec.shape == expected.shape
        torch.testing.assert_close(x.full_tensor(), expected)
        torch.testing.assert_close((x * 2).full_tensor(), expected * 2)


# Floating-point results of integers have the default dtype.
OF_INTEGERS: dict[str, Call] = {
    "a product": lambda x: x * (1 / 3),
    "a quotient": lambda x: x / 3,
    "a root": lambda x: (x * x).sqrt(),
    "a mean": lambda x: (x / 1).mean(0),
    "a quotient of integers": lambda x: x / (x * x + 1),
    "a list": lambda x: torch._foreach_div([x], 3)[0],
}


@pytest.mark.parametrize("name", OF_INTEGERS)
@on_ranks(2)
def test_another_default_dtype_is_another_decision(rank: int, world: int, name: str) -> None:
    call = OF_INTEGERS[name]
    whole = torch.arange(1, 13).reshape(4, 3)
    with funcol.installed():
        x = distribute_tensor(whole, mesh_of(2), [Shard(0)])
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                result, expected = call(x), call(whole)
                assert isinstance(result, DTensor)
                assert result.dtype == result.to_local().dtype == expected.dtype == dtype
                torch.testing.assert_close(result.full_tensor(), expected, rtol=0, atol=0)
            finally:
                torch.set_default_dtype(torch.float32)
