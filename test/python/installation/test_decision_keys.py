"""With funcol under DTensor, a call is decided for itself if it differs from one before in an argument that
is not a tensor, in the default dtype, or in a tensor that is given by keyword."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from ranks import on_ranks
from sharded import mesh_of, placed
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from twins import agrees, as_on_plain_tensors, numbers

import funcol

ON_DEVICES = True

Call = Callable[[Tensor], Tensor]


class Pair(NamedTuple):
    """Two calls on tensors of the same kind, the second of which must not be decided as the first."""

    first: Call
    second: Call
    words: str


PAIRS = {
    "unsqueeze_copy": Pair(lambda x: torch.unsqueeze_copy(x, 3), lambda x: torch.unsqueeze_copy(x, 0), "S1"),
    "transpose_copy": Pair(
        lambda x: torch.transpose_copy(x, 0, 2), lambda x: torch.transpose_copy(x, 1, 2), "S1"
    ),
    "permute_copy": Pair(
        lambda x: torch.permute_copy(x, (0, 1, 2)), lambda x: torch.permute_copy(x, (2, 1, 0)), "S0"
    ),
    "std_mean": Pair(
        lambda x: torch.std_mean(x, 0, correction=1)[0],
        lambda x: torch.std_mean(x, 0, correction=0)[0],
        "S0",
    ),
    "std_mean over another dim": Pair(
        lambda x: torch.std_mean(x, 2)[0], lambda x: torch.std_mean(x, 1)[0], "S0"
    ),
    "pdist, another norm": Pair(
        lambda x: torch.pairwise_distance(x, x + 1, p=1.0),
        lambda x: torch.pairwise_distance(x, x + 1, p=3.0),
        "S2",
    ),
    "div, rounded": Pair(
        lambda x: torch.div(x, 3.0, rounding_mode=None),
        lambda x: torch.div(x, 3.0, rounding_mode="floor"),
        "Psum",
    ),
    "sum in another dtype": Pair(lambda x: x.sum(), lambda x: x.sum(dtype=torch.float32), "S0"),
    "mean in another dtype": Pair(lambda x: x.mean(1), lambda x: x.mean(1, dtype=torch.float32), "S0"),
    "view as another dtype": Pair(lambda x: x.view(torch.int64), lambda x: x.view(torch.float64), "R"),
    "histc, other bins": Pair(lambda x: x.histc(4, -8, 8), lambda x: x.histc(6, -8, 8), "R"),
}


def quarters(*shape: int) -> Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64).reshape(shape) * 7) % 11 - 5.25


@pytest.mark.parametrize(("name", "words"), [(name, pair.words) for name, pair in PAIRS.items()])
@as_on_plain_tensors(lambda: [quarters(2, 4, 6)])
def test_another_argument_is_another_decision(x: Tensor, *, name: str) -> list[Tensor]:
    pair = PAIRS[name]
    return [call(x) for call in (pair.first, pair.second, pair.first)]


@pytest.mark.parametrize("words", ["R", "S1", "S2", "Psum"])
@as_on_plain_tensors(lambda: [quarters(1, 4, 6)])
def test_squeezing_in_place_changes_the_tensor(x: Tensor) -> Tensor:
    assert x.squeeze_(0) is x
    assert not isinstance(x, DTensor) or x._spec.shape == (4, 6)
    return x * 2


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
        x = distribute_tensor(whole, mesh_of((2,)), [Shard(0)])
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            try:
                result, expected = call(x), call(whole)
                assert isinstance(result, DTensor)
                assert result.dtype == result.to_local().dtype == expected.dtype == dtype
                torch.testing.assert_close(result.full_tensor(), expected, rtol=0, atol=0)
            finally:
                torch.set_default_dtype(torch.float32)


# Tensors that operators take by keyword

MASKS = ["R", "S1", "S2", "Psum"]


def heads_and_mask(*mask: int) -> list[Tensor]:
    return [*(numbers(2, 4, 6, 8, seed=i).float() for i in range(3)), numbers(*mask).float()]


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = None if mask is None else mask.detach()
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("heads", ["S1", "R"])
@pytest.mark.parametrize("second", MASKS)
@pytest.mark.parametrize("first", MASKS)
@on_ranks(2)
def test_attention_decides_anew_for_a_mask_elsewhere(
    rank: int, world: int, first: str, second: str, heads: str, with_gradients: bool
) -> None:
    with funcol.installed():
        for mask in (first, second):
            words = [heads, heads, heads, mask]
            agrees(rank, world, attention, heads_and_mask(2, 4, 6, 6), words, (world,), with_gradients)


@pytest.mark.parametrize("mask_first", [False, True])
@on_ranks(2)
def test_attention_decides_anew_with_and_without_a_mask(rank: int, world: int, mask_first: bool) -> None:
    tensors, words = heads_and_mask(6, 6), ["S1", "S1", "S1", "S0"]
    with funcol.installed():
        for count in (4, 3) if mask_first else (3, 4):
            agrees(rank, world, attention, tensors[:count], words[:count], (world,), False)


@as_on_plain_tensors(lambda: heads_and_mask(2, 4, 6, 6), words=("S1", "S1", "S1", "Psum"), compiles={})
def test_compiled_attention_reduces_a_partial_mask_first(*tensors: Tensor) -> Tensor:
    return attention(*tensors)


def product_into(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    held = out.placements if isinstance(out, DTensor) else None
    torch.bmm(a, b, out=out)
    assert not isinstance(out, DTensor) or out.placements == held
    return out


@pytest.mark.parametrize(("first", "second"), [("R", "S1"), ("S1", "R"), ("S1", "S2")])
@on_ranks(2)
def test_out_is_decided_anew_for_an_out_elsewhere(rank: int, world: int, first: str, second: str) -> None:
    tensors = [numbers(4, 6, 6, seed=i).float() for i in range(3)]
    with funcol.installed():
        for out in (first, second):
            agrees(rank, world, product_into, tensors, ["S0", "S0", out], (world,), False)


@on_ranks(2)
def test_uninstall_puts_back_what_the_dispatcher_knows_of_arguments(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    dispatcher = DTensor._op_dispatcher
    tables = dispatcher.sharding_propagator.op_to_schema_info
    before = {op: repr(info) for op, info in tables.items()}
    with funcol.installed():
        given = [placed(torch.randn(2, 4, 6, 8), "S1", mesh) for _ in range(3)]
        functional.scaled_dot_product_attention(*given)
        out = placed(torch.zeros(4, 6, 6), "S0", mesh)
        torch.bmm(out + 1, out + 1, out=out)
    assert {op: repr(info) for op, info in tables.items()} == before
