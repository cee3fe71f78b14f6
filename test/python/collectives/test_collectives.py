"""Every function gives what stock PyTorch gives: values, dtype, shape, strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from differential import (
    DTYPES,
    LAYOUTS,
    LAYOUTS_OF_DTYPES,
    PROGRAM_SHAPE,
    PROGRAMS,
    REDUCE_OPS,
    REDUCTIONS,
    WORLDS,
    assert_same,
    finished,
    sample,
    world_group,
)
from ranks import device_type, on_ranks, run_ranks
from torch import Tensor

import funcol

ON_DEVICES = True

each_world = pytest.mark.parametrize("world", WORLDS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_reduction = pytest.mark.parametrize(("dtype", "reduce_op"), REDUCTIONS, ids=str)
each_layout = pytest.mark.parametrize(("layout", "dtype"), LAYOUTS_OF_DTYPES, ids=str)
each_function = pytest.mark.parametrize("function", PROGRAMS)
# Sizes 0, 1, odd and a multiple of nothing else; also more elements than gloo handles in one segment.
SHAPES = [(), (0,), (1,), (7,), (2, 3), (1, 1), (0, 3), (3, 0), (2, 3, 5), (1, 0, 4), (300, 129)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def plain(x: Tensor) -> Tensor:
    """Returns ``x`` as older releases of stock PyTorch want it."""
    return x.resolve_conj().resolve_neg().contiguous()


# all_reduce


def all_reduce_agrees(
    rank: int, world: int, shape: tuple[int, ...], dtype: torch.dtype, reduce_op: str, layout: str = ""
) -> None:
    x = LAYOUTS[layout](rank, shape, dtype) if layout else sample(rank, shape, dtype)
    expected = finished(stock.all_reduce(x, reduce_op, world_group()))
    assert_same(funcol.all_reduce(x, reduce_op, world_group()), expected)


@pytest.mark.sampled(6)
@each_world
@each_reduction
def test_all_reduce_agrees_for_each_dtype_and_op(world: int, dtype: torch.dtype, reduce_op: str) -> None:
    run_ranks(all_reduce_agrees, world, (5, 3), dtype, reduce_op)


@each_world
@each_shape
def test_all_reduce_agrees_for_each_shape(world: int, shape: tuple[int, ...]) -> None:
    run_ranks(all_reduce_agrees, world, shape, torch.float32, "sum")


@each_world
@each_layout
def test_all_reduce_agrees_for_each_layout(world: int, layout: str, dtype: torch.dtype) -> None:
    run_ranks(all_reduce_agrees, world, (4, 3, 6), dtype, "sum", layout)


# all_gather_tensor


def all_gather_agrees(
    rank: int, world: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype, layout: str = ""
) -> None:
    x = LAYOUTS[layout](rank, shape, dtype) if layout else sample(rank, shape, dtype)
    expected = finished(stock.all_gather_tensor(plain(x), dim % x.dim(), world_group()))
    assert_same(funcol.all_gather_tensor(x, dim, world_group()), expected)


@each_world
@each_dtype
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather_agrees_for_each_dtype_and_dim(world: int, dtype: torch.dtype, dim: int) -> None:
    run_ranks(all_gather_agrees, world, (2, 3, 5), dim, dtype)


@each_world
@pytest.mark.parametrize(
    ("shape", "dim"), [(shape, dim) for shape in SHAPES for dim in range(-len(shape), len(shape))], ids=str
)
def test_all_gather_agrees_for_each_shape_and_dim(world: int, shape: tuple[int, ...], dim: int) -> None:
    run_ranks(all_gather_agrees, world, shape, dim, torch.float32)


@each_world
@each_layout
@pytest.mark.parametrize("dim", [0, 2])
def test_all_gather_agrees_for_each_layout(world: int, layout: str, dtype: torch.dtype, dim: int) -> None:
    run_ranks(all_gather_agrees, world, (4, 3, 6), dim, dtype, layout)


# reduce_scatter_tensor


def reduce_scatter_agrees(
    rank: int,
    world: int,
    shape: tuple[int, ...],
    dim: int,
    dtype: torch.dtype,
    reduce_op: str,
    layout: str = "",
) -> None:
    """``shape`` is that of the result."""
    shape = (*shape[:dim], world * shape[dim], *shape[dim + 1 :])
    x = LAYOUTS[layout](rank, shape, dtype) if layout else sample(rank, shape, dtype)
    expected = finished(stock.reduce_scatter_tensor(plain(x), reduce_op, dim, world_group()))
    assert_same(funcol.reduce_scatter_tensor(x, reduce_op, dim, world_group()), expected)
    from_the_end = dim - len(shape)
    assert_same(funcol.reduce_scatter_tensor(x, reduce_op, from_the_end, world_group()), expected)


@each_world
@each_reduction
def test_reduce_scatter_agrees_for_each_dtype_and_op(world: int, dtype: torch.dtype, reduce_op: str) -> None:
    run_ranks(reduce_scatter_agrees, world, (5, 3), 0, dtype, reduce_op)


@each_world
@each_dtype
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_reduce_scatter_agrees_for_each_dtype_and_dim(world: int, dtype: torch.dtype, dim: int) -> None:
    run_ranks(reduce_scatter_agrees, world, (2, 3, 5), dim, dtype, "sum")


@each_world
@pytest.mark.parametrize(
    ("shape", "dim"), [(shape, dim) for shape in SHAPES for dim in range(len(shape))], ids=str
)
def test_reduce_scatter_agrees_for_each_shape_and_dim(world: int, shape: tuple[int, ...], dim: int) -> None:
    run_ranks(reduce_scatter_agrees, world, shape, dim, torch.float32, "sum")


@each_world
@each_layout
@pytest.mark.parametrize("dim", [0, 2])
def test_reduce_scatter_agrees_for_each_layout(world: int, layout: str, dtype: torch.dtype, dim: int) -> None:
    run_ranks(reduce_scatter_agrees, world, (4, 3, 6), dim, dtype, "sum", layout)


# all_to_all_single


def uneven_split(sender: int, receiver: int) -> int:
    return (sender + 2 * receiver) % 4


def all_to_all_agrees(
    rank: int, world: int, row: tuple[int, ...], even: bool, dtype: torch.dtype, layout: str = ""
) -> None:
    sent = [uneven_split(rank, other) for other in range(world)]
    received = [uneven_split(other, rank) for other in range(world)]
    shape = (2 * world if even else sum(sent), *row)
    x = LAYOUTS[layout](rank, shape, dtype) if layout else sample(rank, shape, dtype)
    splits = (None, None) if even else (received, sent)
    expected = finished(stock.all_to_all_single(plain(x), *splits, world_group()))
    assert_same(funcol.all_to_all_single(x, *splits, world_group()), expected)


# Stock PyTorch cannot exchange complex numbers: test_beyond_stock.py.
EXCHANGED = [dtype for dtype in DTYPES if not dtype.is_complex]


@each_world
@pytest.mark.parametrize("dtype", EXCHANGED, ids=str)
@pytest.mark.parametrize("even", [True, False])
def test_all_to_all_agrees_for_each_dtype(world: int, dtype: torch.dtype, even: bool) -> None:
    run_ranks(all_to_all_agrees, world, (3,), even, dtype)


@each_world
@pytest.mark.parametrize("row", [(), (1,), (5,), (2, 3), (0,), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("even", [True, False])
def test_all_to_all_agrees_for_each_shape_of_a_row(world: int, row: tuple[int, ...], even: bool) -> None:
    run_ranks(all_to_all_agrees, world, row, even, torch.float32)


@each_world
@pytest.mark.parametrize("layout", ["transposed", "strided", "offset", "negated"])
@pytest.mark.parametrize("even", [True, False])
def test_all_to_all_agrees_for_each_layout(world: int, layout: str, even: bool) -> None:
    run_ranks(all_to_all_agrees, world, (3, 4), even, torch.float32, layout)


@each_world
@on_ranks()
def test_all_to_all_agrees_if_nothing_is_sent(rank: int, world: int) -> None:
    x = torch.empty(0, 3)
    splits = [0] * world
    expected = finished(stock.all_to_all_single(x, splits, splits, world_group()))
    assert_same(funcol.all_to_all_single(x, splits, splits, world_group()), expected)


# broadcast


def broadcast_agrees(
    rank: int, world: int, shape: tuple[int, ...], src: int, dtype: torch.dtype, layout: str = ""
) -> None:
    x = LAYOUTS[layout](rank, shape, dtype) if layout else sample(rank, shape, dtype)
    expected = finished(stock.broadcast(x, src, world_group()))
    assert_same(funcol.broadcast(x, src, world_group()), expected)


@pytest.mark.parametrize(("world", "src"), [(world, src) for world in WORLDS for src in range(world)])
@each_dtype
def test_broadcast_agrees_for_each_dtype_and_source(world: int, src: int, dtype: torch.dtype) -> None:
    run_ranks(broadcast_agrees, world, (5, 3), src, dtype)


@each_world
@each_shape
def test_broadcast_agrees_for_each_shape(world: int, shape: tuple[int, ...]) -> None:
    run_ranks(broadcast_agrees, world, shape, 0, torch.float32)


@each_world
@each_layout
def test_broadcast_agrees_for_each_layout(world: int, layout: str, dtype: torch.dtype) -> None:
    run_ranks(broadcast_agrees, world, (4, 3, 6), world - 1, dtype, layout)


# permute_tensor


def permute_agrees(rank: int, world: int, size: int, shift: int, dtype: torch.dtype) -> None:
    x = sample(rank, (size,), dtype)
    src_dst = [(sender + shift) % world for sender in range(world)]
    expected = finished(stock.permute_tensor(x, src_dst, world_group()))
    assert_same(funcol.permute_tensor(x, src_dst, world_group()), expected)


@each_world
@pytest.mark.parametrize("dtype", EXCHANGED, ids=str)
@pytest.mark.parametrize("shift", [0, 1, -1])
def test_permute_agrees_for_each_dtype_and_rotation(world: int, dtype: torch.dtype, shift: int) -> None:
    run_ranks(permute_agrees, world, 5, shift, dtype)


@each_world
@pytest.mark.parametrize("size", [0, 1, 7, 1000])
def test_permute_agrees_for_each_size(world: int, size: int) -> None:
    run_ranks(permute_agrees, world, size, 1, torch.float32)


@pytest.mark.parametrize(("world", "receiver"), [(world, dst) for world in WORLDS for dst in range(world)])
@on_ranks()
def test_permute_to_one_rank_agrees(rank: int, world: int, receiver: int) -> None:
    x = sample(rank, (4,))
    src_dst = [receiver] * world
    expected = finished(stock.permute_tensor(x, src_dst, world_group()))
    assert_same(funcol.permute_tensor(x, src_dst, world_group()), expected)


# The coalesced functions

# Several tensors of one call: different numbers of dims, a tensor without elements, a single one.
LISTS_OF_SHAPES = [[(5, 3)], [(2,), (3, 4), (1, 1, 7)], [(2, 3), (0, 3), (4,)], [(0,), (0, 2)]]
each_list = pytest.mark.parametrize("shapes", LISTS_OF_SHAPES, ids=str)


def samples(rank: int, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
    return [sample(rank + 10 * index, shape, dtype) for index, shape in enumerate(shapes)]


def error_of_stock(dtype: torch.dtype, reduce_op: str) -> float:
    """Returns the rounding of stock's coalesced functions, which divide complex numbers, not their two parts.
    On devices, complex numbers are reduced one tensor after the other, and NCCL may add in another order."""
    is_rounded = dtype.is_complex and (reduce_op == "avg" or device_type() == "cuda")
    return 4 * torch.finfo(dtype).eps if is_rounded else 0


def all_reduce_coalesced_agrees(
    rank: int, world: int, shapes: list[tuple[int, ...]], dtype: torch.dtype, reduce_op: str
) -> None:
    tensors = samples(rank, shapes, dtype)
    if device_type() == "cuda" and dtype.is_complex:  # which PyTorch's own hands to NCCL, which refuses it
        expected = [finished(stock.all_reduce(x, reduce_op, world_group())) for x in tensors]
    else:
        expected = finished(stock.all_reduce_coalesced(tensors, reduce_op, world_group()))
    actual = funcol.all_reduce_coalesced(tensors, reduce_op, world_group())
    assert_same(actual, expected, error_of_stock(dtype, reduce_op))


@each_world
@each_reduction
def test_all_reduce_coalesced_agrees_for_each_dtype_and_op(
    world: int, dtype: torch.dtype, reduce_op: str
) -> None:
    run_ranks(all_reduce_coalesced_agrees, world, [(5, 3), (4,)], dtype, reduce_op)


@each_world
@each_list
def test_all_reduce_coalesced_agrees_for_each_list_of_shapes(world: int, shapes: Any) -> None:
    run_ranks(all_reduce_coalesced_agrees, world, shapes, torch.float32, "sum")


def all_gather_coalesced_agrees(
    rank: int, world: int, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> None:
    tensors = samples(rank, shapes, dtype)
    expected = finished(stock.all_gather_into_tensor_coalesced(tensors, world_group()))
    assert_same(funcol.all_gather_into_tensor_coalesced(tensors, world_group()), expected)


@each_world
@pytest.mark.parametrize("dtype", EXCHANGED, ids=str)
def test_all_gather_coalesced_agrees_for_each_dtype(world: int, dtype: torch.dtype) -> None:
    run_ranks(all_gather_coalesced_agrees, world, [(5, 3), (4,)], dtype)


@each_world
@on_ranks()
def test_all_gather_coalesced_agrees_for_several_dtypes_in_one_call(rank: int, world: int) -> None:
    tensors = [sample(rank, (5, 3), dtype) for dtype in (torch.float32, torch.int64, torch.float64)]
    expected = finished(stock.all_gather_into_tensor_coalesced(tensors, world_group()))
    assert_same(funcol.all_gather_into_tensor_coalesced(tensors, world_group()), expected)


@each_world
@each_list
def test_all_gather_coalesced_agrees_for_each_list_of_shapes(world: int, shapes: Any) -> None:
    run_ranks(all_gather_coalesced_agrees, world, shapes, torch.float32)


def reduce_scatter_coalesced_agrees(
    rank: int, world: int, shapes: list[tuple[int, ...]], dims: list[int], dtype: torch.dtype, reduce_op: str
) -> None:
    """``shapes`` are those of the results."""
    shapes = [
        (*shape[:dim], world * shape[dim], *shape[dim + 1 :]) for shape, dim in zip(shapes, dims, strict=True)
    ]
    tensors = samples(rank, shapes, dtype)
    if device_type() == "cuda" and dtype.is_complex:  # as above
        expected = [
            finished(stock.reduce_scatter_tensor(x, reduce_op, dim, world_group()))
            for x, dim in zip(tensors, dims, strict=True)
        ]
    else:
        # Stock PyTorch changes the list that it is given.
        copy = list(tensors)
        expected = finished(stock.reduce_scatter_tensor_coalesced(copy, reduce_op, dims, world_group()))
    actual = funcol.reduce_scatter_tensor_coalesced(tensors, reduce_op, dims, world_group())
    assert_same(actual, expected, error_of_stock(dtype, reduce_op))


@each_world
@each_reduction
def test_reduce_scatter_coalesced_agrees_for_each_dtype_and_op(
    world: int, dtype: torch.dtype, reduce_op: str
) -> None:
    run_ranks(reduce_scatter_coalesced_agrees, world, [(5, 3), (4,)], [1, 0], dtype, reduce_op)


@each_world
@each_list
def test_reduce_scatter_coalesced_agrees_for_each_list_of_shapes(world: int, shapes: Any) -> None:
    dims = [len(shape) - 1 for shape in shapes]
    run_ranks(reduce_scatter_coalesced_agrees, world, shapes, dims, torch.float32, "sum")


# Properties shared by all functions

FORMS_OF_A_REDUCE_OP = {
    "lower": str.lower,
    "upper": str.upper,
    "capitalized": str.capitalize,
    "enum": lambda name: getattr(dist.ReduceOp, name.upper()),
    "object": lambda name: dist.ReduceOp(getattr(dist.ReduceOp, name.upper())),
}
CALLS_WITH_A_REDUCE_OP = {
    "all_reduce": lambda api, x, op: api.all_reduce(x, op, world_group()),
    "reduce_scatter_tensor": lambda api, x, op: api.reduce_scatter_tensor(x, op, 0, world_group()),
    "all_reduce_coalesced": lambda api, x, op: api.all_reduce_coalesced([x, x], op, world_group()),
    "reduce_scatter_tensor_coalesced": lambda api, x, op: api.reduce_scatter_tensor_coalesced(
        [x, x], op, [0, 1], world_group()
    ),
}


def each_form_of_a_reduce_op_agrees(rank: int, world: int, function: str, name: str, form: str) -> None:
    x = sample(rank, PROGRAM_SHAPE, torch.float32 if name == "avg" else torch.int32)
    call = CALLS_WITH_A_REDUCE_OP[function]
    expected = finished(call(stock, x, name))
    assert_same(call(funcol, x, FORMS_OF_A_REDUCE_OP[form](name)), expected)


@pytest.mark.parametrize("function", CALLS_WITH_A_REDUCE_OP)
@pytest.mark.parametrize("reduce_op", REDUCE_OPS)
@pytest.mark.parametrize("form", FORMS_OF_A_REDUCE_OP)
def test_a_reduce_op_is_a_name_in_any_case_or_an_object(function: str, reduce_op: str, form: str) -> None:
    run_ranks(each_form_of_a_reduce_op_agrees, 2, function, reduce_op, form)


@each_world
@each_function
@on_ranks()
def test_inputs_are_left_as_they_are(rank: int, world: int, function: str) -> None:
    x = sample(rank, PROGRAM_SHAPE)
    before = x.clone()
    results = PROGRAMS[function](funcol, x, world, world_group())
    for result in [results] if isinstance(results, Tensor) else results:
        assert finished(result).data_ptr() != x.data_ptr()
    assert torch.equal(x, before)
    assert x._version == before._version


@each_world
@each_function
@on_ranks()
def test_an_input_may_be_pending(rank: int, world: int, function: str) -> None:
    x = sample(rank, PROGRAM_SHAPE)
    pending = funcol.all_reduce(x, "sum", world_group())
    reduced = finished(stock.all_reduce(x, "sum", world_group()))
    program = PROGRAMS[function]
    expected = finished(program(stock, reduced, world, world_group()))
    assert_same(program(funcol, pending, world, world_group()), expected)


@each_world
@each_function
@on_ranks()
def test_results_are_pending_until_waited_for(rank: int, world: int, function: str) -> None:
    results = PROGRAMS[function](funcol, sample(rank, PROGRAM_SHAPE), world, world_group())
    results = [results] if isinstance(results, Tensor) else results
    assert all(map(funcol.is_pending, results))
    funcol.wait_tensors(results)
    assert not any(map(funcol.is_pending, results))


@pytest.mark.parametrize(
    ("alias", "function"),
    [
        ("all_gather_single", "all_gather_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
        ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"),
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    ],
)
def test_newer_names_are_the_same_functions(alias: str, function: str) -> None:
    assert getattr(funcol, alias) is getattr(funcol, function)
