"""The same call through stock PyTorch and through funcol: inputs, calls, comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from ranks import device_type
from torch import Tensor

WORLDS = [1, 2, 3]

FLOATING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

INTEGRAL = [torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool]

COMPLEX = [torch.complex64]

DTYPES = [*FLOATING, *INTEGRAL, *COMPLEX]

REDUCE_OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]


# Reductions that gloo supports; it rejects the rest.
REDUCTIONS = [
    *[(dtype, op) for dtype in FLOATING for op in ("sum", "avg", "product", "min", "max")],
    *[(dtype, op) for dtype in INTEGRAL for op in REDUCE_OPS if op != "avg"],
    *[(dtype, op) for dtype in COMPLEX for op in ("sum", "avg")],
]


def world_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def destroyed_group() -> dist.ProcessGroup:
    """Makes a group of all ranks and destroys it, once no rank is connecting to another any longer."""
    group = dist.new_group()
    dist.barrier()
    dist.destroy_process_group(group)
    return group


def sample(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the tensor of ``rank``, seeded by the rank: each rank can make those of all others."""
    generator = torch.Generator(device_type()).manual_seed(1000 + rank)
    if dtype.is_complex:
        return torch.randn(tuple(shape), dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).to(dtype)
    return torch.randint(0, 100, tuple(shape), generator=generator).to(dtype)


def _transposed(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return sample(rank, shape[::-1], dtype).permute(*range(len(shape) - 1, -1, -1))


def _strided(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return sample(rank, [*shape[:-1], 2 * shape[-1]], dtype)[..., ::2]


def _offset(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return sample(rank, [math.prod(shape) + 3], dtype)[3:].view(*shape)


def _expanded(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return sample(rank, [1, *shape[1:]], dtype).expand(*shape)


def _negated(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch._neg_view(sample(rank, shape, dtype))


def _conjugated(rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return sample(rank, shape, dtype).conj()


# Inputs of a given shape that are not contiguous, or are views of other memory.
LAYOUTS: dict[str, Callable[[int, Sequence[int], torch.dtype], Tensor]] = {
    "transposed": _transposed,
    "strided": _strided,
    "offset": _offset,
    "expanded": _expanded,
    "negated": _negated,
    "conjugated": _conjugated,
}

LAYOUTS_OF_DTYPES = [
    (layout, dtype)
    for layout in LAYOUTS
    for dtype in (torch.float32, torch.int8, torch.complex64)
    if layout != "conjugated" or dtype.is_complex
    if layout != "negated" or dtype != torch.int8
]


# One plain call of each function: PROGRAMS[name](stock or funcol, x, number of ranks, group[, tag]). What is
# in DIMS takes the dim as well.
PROGRAMS: dict[str, Callable[..., Tensor | list[Tensor]]] = {
    "all_reduce": lambda api, x, size, *group: api.all_reduce(x, "sum", *group),
    "all_gather_tensor": lambda api, x, size, *group, dim=1: api.all_gather_tensor(x, dim, *group),
    "reduce_scatter_tensor": lambda api, x, size, *group, dim=1: api.reduce_scatter_tensor(
        x, "sum" if x.is_complex() else "max", dim, *group
    ),
    "all_to_all_single": lambda api, x, size, *group: api.all_to_all_single(x, None, None, *group),
    "broadcast": lambda api, x, size, *group: api.broadcast(x, size - 1, *group),
    "permute_tensor": lambda api, x, size, *group: api.permute_tensor(
        x.flatten(), [(rank + 1) % size for rank in range(size)], *group
    ),
    "all_reduce_coalesced": lambda api, x, size, *group: api.all_reduce_coalesced([x, x[1:2]], "sum", *group),
    "all_gather_into_tensor_coalesced": lambda api, x, size, *group: api.all_gather_into_tensor_coalesced(
        [x, x[1:2]], *group
    ),
    "reduce_scatter_tensor_coalesced": lambda api, x, size, *group, dim=1: (
        api.reduce_scatter_tensor_coalesced([x, x.flip(0)], "sum", [0, dim], *group)
    ),
}

DIMS = {
    name: [0, 1, -1]
    for name in ("all_gather_tensor", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
}

PROGRAM_SHAPE = (12, 12)  # divisible by every number of ranks in use


def finished(result: Any) -> Any:
    """Returns ``result`` of stock PyTorch or of funcol, a tensor or several, as plain tensors with their
    data.

    A test finishes stock's result before it starts another collective: two gathers or reduce-scatters in
    flight on gloo, one of them stock's, now and then corrupt the heap ("unaligned tcache chunk"), also in a
    process that never imports funcol.
    """
    if isinstance(result, (list, tuple)):
        return [finished(one) for one in result]
    if isinstance(result, stock.AsyncCollectiveTensor):
        return result.wait()
    return stock.wait_tensor(result)


def assert_same(
    actual: Tensor | list[Tensor], expected: Tensor | list[Tensor], relative_error: float = 0
) -> None:
    """Same type, dtype, shape, strides and value.

    Exactly the same value by default, since both sides hand the same buffers to the same algorithm.
    """
    if isinstance(expected, list):
        assert type(actual) is list, type(actual)
        assert len(actual) == len(expected), f"{len(actual)} results, expected {len(expected)}"
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other, relative_error)
        return
    assert type(actual) is Tensor, type(actual)
    assert type(expected) is Tensor, "stock's result is to be finished first"
    assert actual.stride() == expected.stride(), f"strides {actual.stride()}, expected {expected.stride()}"
    assert not actual.is_conj()
    assert not actual.is_neg()
    torch.testing.assert_close(actual, expected, rtol=relative_error, atol=0, equal_nan=True)


def assert_plain(actual: Tensor, expected: Tensor) -> None:
    """Same dtype, shape and bits, and contiguous."""
    assert type(actual) is Tensor
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    assert bits(actual) == bits(expected)


def bits(x: Tensor) -> list[int]:
    return x.resolve_conj().resolve_neg().contiguous().reshape(-1, 1).view(torch.uint8).tolist()


def small_sample(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """:func:`sample` for dtypes that random generators do not know as well."""
    if dtype.is_complex:
        return sample(rank, shape, torch.complex128).to(dtype)
    return sample(rank, shape, torch.uint8).to(dtype)
