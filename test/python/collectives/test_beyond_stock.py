"""Inputs that stock PyTorch or gloo refuses: results equal what all inputs give when put together here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from differential import LAYOUTS, WORLDS, assert_plain, sample, small_sample, world_group
from ranks import on_ranks, run_ranks
from torch import Tensor

import funcol

ON_DEVICES = True

each_world = pytest.mark.parametrize("world", WORLDS)


# Dtypes that gloo does not know, and complex ones, which some of its collectives do not know.
MOVED = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]

each_dtype = pytest.mark.parametrize("dtype", MOVED, ids=str)


# all_gather_tensor


def gathers(rank: int, world: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    inputs = [small_sample(peer, shape, dtype) for peer in range(world)]
    assert_plain(funcol.all_gather_tensor(inputs[rank], dim, world_group()), torch.cat(inputs, dim))


@each_world
@each_dtype
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_all_gather_moves_each_dtype(world: int, dtype: torch.dtype, dim: int) -> None:
    run_ranks(gathers, world, (2, 3, 5), dim, dtype)


@each_world
@each_dtype
def test_all_gather_moves_empty_tensors_of_each_dtype(world: int, dtype: torch.dtype) -> None:
    run_ranks(gathers, world, (2, 0, 5), 2, dtype)


@each_world
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.int16], ids=str)
@on_ranks()
def test_all_gather_takes_a_0_dim_tensor_as_a_1_dim_one(
    rank: int, world: int, dim: int, dtype: torch.dtype
) -> None:
    inputs = [small_sample(peer, (), dtype) for peer in range(world)]
    assert_plain(funcol.all_gather_tensor(inputs[rank], dim, world_group()), torch.stack(inputs))


@each_world
@each_dtype
@on_ranks()
def test_all_gather_coalesced_moves_each_dtype(rank: int, world: int, dtype: torch.dtype) -> None:
    shapes = [(2, 3), (), (0, 4), (5,)]
    inputs = [[small_sample(peer, shape, dtype) for shape in shapes] for peer in range(world)]
    results = funcol.all_gather_into_tensor_coalesced(inputs[rank], world_group())
    assert len(results) == len(shapes)
    for result, shards in zip(results, zip(*inputs, strict=True), strict=True):
        assert_plain(result, torch.cat([shard if shard.dim() else shard.view(1) for shard in shards]))


# all_to_all_single


def exchanges(rank: int, world: int, row: tuple[int, ...], dtype: torch.dtype, layout: str = "") -> None:
    """Rank r sends (r + s) % 3 rows to rank s."""
    splits = [[(sender + receiver) % 3 for receiver in range(world)] for sender in range(world)]
    make = LAYOUTS[layout] if layout else small_sample
    inputs = [make(peer, (sum(splits[peer]), *row), dtype) for peer in range(world)]
    received = [splits[sender][rank] for sender in range(world)]
    result = funcol.all_to_all_single(inputs[rank], received, splits[rank], world_group())
    shares = [x.split(rows)[rank] for x, rows in zip(inputs, splits, strict=True)]
    assert_plain(result, torch.cat(shares))


@each_world
@each_dtype
@pytest.mark.parametrize("row", [(), (3,), (0,)], ids=str)
def test_all_to_all_moves_each_dtype(world: int, dtype: torch.dtype, row: tuple[int, ...]) -> None:
    run_ranks(exchanges, world, row, dtype)


@each_world
@pytest.mark.parametrize("layout", ["transposed", "strided", "conjugated"])
def test_all_to_all_moves_complex_numbers_of_each_layout(world: int, layout: str) -> None:
    run_ranks(exchanges, world, (3, 4), torch.complex64, layout)


# broadcast


def broadcasts(rank: int, world: int, src: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = small_sample(rank, shape, dtype)
    assert_plain(funcol.broadcast(x, src, world_group()), small_sample(src, shape, dtype))


@pytest.mark.parametrize(("world", "src"), [(world, src) for world in WORLDS for src in range(world)])
@each_dtype
def test_broadcast_moves_each_dtype(world: int, src: int, dtype: torch.dtype) -> None:
    run_ranks(broadcasts, world, src, (2, 3), dtype)


@each_world
@each_dtype
def test_broadcast_moves_a_0_dim_tensor_of_each_dtype(world: int, dtype: torch.dtype) -> None:
    run_ranks(broadcasts, world, 0, (), dtype)


# permute_tensor


def permutes(
    rank: int, world: int, src_dst: list[int], shape: tuple[int, ...], dtype: torch.dtype, layout: str = ""
) -> None:
    make = LAYOUTS[layout] if layout else small_sample
    result = funcol.permute_tensor(make(rank, shape, dtype), src_dst, world_group())
    received = [make(sender, shape, dtype) for sender, receiver in enumerate(src_dst) if receiver == rank]
    if len(received) == 1:
        assert_plain(result, received[0])
    else:
        rows = [x if x.dim() else x.view(1) for x in received]
        assert_plain(result, torch.cat(rows) if rows else torch.empty(0, *shape[1:], dtype=dtype))


@each_world
@each_dtype
def test_permute_moves_each_dtype(world: int, dtype: torch.dtype) -> None:
    run_ranks(permutes, world, [(rank + 1) % world for rank in range(world)], (2, 3), dtype)


@each_world
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3), (2, 0, 3), (2, 3, 5)], ids=str)
def test_permute_moves_each_shape(world: int, shape: tuple[int, ...]) -> None:
    run_ranks(permutes, world, [(rank - 1) % world for rank in range(world)], shape, torch.float32)


@each_world
@pytest.mark.parametrize("layout", LAYOUTS)
def test_permute_moves_each_layout(world: int, layout: str) -> None:
    run_ranks(permutes, world, list(reversed(range(world))), (3, 4), torch.complex64, layout)


@pytest.mark.parametrize("src_dst", [[], [0], [2], [1, 0], [2, 2], [0, 0, 1], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (4,), ()], ids=str)
def test_permute_concatenates_whatever_number_of_tensors_comes(
    src_dst: list[int], shape: tuple[int, ...]
) -> None:
    run_ranks(permutes, 3, src_dst, shape, torch.float32)


# all_to_all of a list


def exchanges_lists(rank: int, world: int, rows: list[int], dtype: torch.dtype, layout: str = "") -> None:
    """Rank ``r`` sends ``rows[(r + s) % len(rows)]`` rows to rank ``s``."""
    make = LAYOUTS[layout] if layout else small_sample

    def sent(sender: int, receiver: int) -> Tensor:
        return make(sender * world + receiver, (rows[(sender + receiver) % len(rows)], 3), dtype)

    output_split_sizes = [sent(sender, rank).shape[0] for sender in range(world)]
    results = funcol.all_to_all([sent(rank, r) for r in range(world)], output_split_sizes, world_group())
    assert all(map(funcol.is_pending, results))
    for sender, result in enumerate(results):
        assert_plain(result, sent(sender, rank))


@each_world
@each_dtype
def test_all_to_all_of_a_list_moves_each_dtype(world: int, dtype: torch.dtype) -> None:
    run_ranks(exchanges_lists, world, [2, 1, 3], dtype)


@each_world
@pytest.mark.parametrize("rows", [[0], [1], [0, 2], [3, 0, 0], [4, 1, 2, 5]], ids=str)
def test_all_to_all_of_a_list_moves_each_number_of_rows(world: int, rows: list[int]) -> None:
    run_ranks(exchanges_lists, world, rows, torch.float32)


@each_world
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_to_all_of_a_list_moves_each_layout(world: int, layout: str) -> None:
    run_ranks(exchanges_lists, world, [2, 3], torch.complex64, layout)


@each_world
@on_ranks()
def test_all_to_all_of_a_list_of_equal_shapes_needs_no_sizes(rank: int, world: int) -> None:
    inputs = [small_sample(rank * world + r, (2, 3), torch.float32) for r in range(world)]
    for sender, result in enumerate(funcol.all_to_all(inputs, None, world_group())):
        assert_plain(result, small_sample(sender * world + rank, (2, 3), torch.float32))


@on_ranks(2)
def test_all_to_all_of_a_list_leaves_its_inputs_and_results_to_the_caller(rank: int, world: int) -> None:
    inputs = [torch.full((2,), float(10 * rank + r)) for r in range(world)]
    results = funcol.all_to_all(inputs, None, world_group())
    for x in inputs:
        x.zero_()
    results[0].add_(1)
    assert [result.tolist() for result in results] == [
        [float(10 * s + rank + (s == 0))] * 2 for s in range(world)
    ]


# Lists


@each_world
@pytest.mark.parametrize(
    "function",
    ["all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"],
)
@on_ranks()
def test_a_coalesced_call_of_no_tensors_gives_no_tensors(rank: int, world: int, function: str) -> None:
    calls = {
        "all_reduce_coalesced": lambda: funcol.all_reduce_coalesced([], "sum", world_group()),
        "all_gather_into_tensor_coalesced": lambda: funcol.all_gather_into_tensor_coalesced(
            [], world_group()
        ),
        "reduce_scatter_tensor_coalesced": lambda: funcol.reduce_scatter_tensor_coalesced(
            [], "sum", [], world_group()
        ),
    }
    assert calls[function]() == []


@on_ranks(2)
def test_a_coalesced_call_takes_a_tuple_of_tensors(rank: int, world: int) -> None:
    x = torch.full((2,), float(rank))
    results = funcol.all_reduce_coalesced((x, x), "sum", world_group())
    assert [result.tolist() for result in results] == [[sum(range(world))] * 2] * 2


@on_ranks(2)
def test_reduce_scatter_coalesced_leaves_the_list_of_its_inputs_as_it_is(rank: int, world: int) -> None:
    tensors = [sample(rank, (4, 2 * world)), sample(rank, (2 * world, 3))]
    before = list(tensors)
    funcol.wait_tensors(funcol.reduce_scatter_tensor_coalesced(tensors, "sum", [1, 0], world_group()))
    assert all(one is other for one, other in zip(tensors, before, strict=True))


# Inputs that need a gradient, which go through autograd and PyTorch's own operators


CALLS_THAT_NEED_A_GRADIENT: dict[str, tuple[tuple[int, ...], torch.dtype, Callable[[Any, int], Any]]] = {
    "all_gather_tensor, 0 dims": (
        (),
        torch.float32,
        lambda x, world: funcol.all_gather_tensor(x, 0, world_group()),
    ),
    "all_to_all_single, complex": (
        (6, 2),
        torch.complex64,
        lambda x, world: funcol.all_to_all_single(x, None, None, world_group()),
    ),
    "permute_tensor, complex": (
        (6, 2),
        torch.complex64,
        lambda x, world: funcol.permute_tensor(x, list(reversed(range(world))), world_group()),
    ),
    "permute_tensor, 0 dims": (
        (),
        torch.float32,
        lambda x, world: funcol.permute_tensor(x, [0] * world, world_group()),
    ),
    "all_gather_into_tensor_coalesced, complex": (
        (6, 2),
        torch.complex64,
        lambda x, world: funcol.all_gather_into_tensor_coalesced([x, 2 * x], world_group()),
    ),
}


@each_world
@pytest.mark.parametrize("call", CALLS_THAT_NEED_A_GRADIENT)
@on_ranks(timeout=20)
def test_an_input_that_needs_a_gradient_gives_the_same_values(rank: int, world: int, call: str) -> None:
    shape, dtype, function = CALLS_THAT_NEED_A_GRADIENT[call]
    x = sample(rank, shape, dtype)
    expected = function(x, world)
    actual = function(x.clone().requires_grad_(), world)
    for one, other in zip(
        [actual] if isinstance(actual, Tensor) else actual,
        [expected] if isinstance(expected, Tensor) else expected,
        strict=True,
    ):
        assert one.requires_grad
        assert_plain(one.detach(), other)
