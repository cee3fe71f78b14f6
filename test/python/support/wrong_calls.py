"""Wrong calls and the errors that they raise."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from differential import world_group
from ranks import device_type
from torch.distributed.device_mesh import init_device_mesh

import funcol

NUM_RANKS = 2


class Mistake(NamedTuple):
    call: Callable[[], Any]
    error: type[Exception]
    words: tuple[str, ...]  # parts of the message


_needs_gradient = False


@contextmanager
def inputs_need_gradient(needed: bool) -> Iterator[None]:
    """Makes ``ones`` return inputs that need a gradient, if ``needed``: calls then go through autograd."""
    global _needs_gradient
    _needs_gradient = needed
    try:
        yield
    finally:
        _needs_gradient = False


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=_needs_gradient)


def name() -> str:
    return world_group().group_name


def assert_raises(call: Callable[[], Any], error: type[Exception], *words: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error, repr(raised.value)
    for part in words:
        assert part in str(raised.value), f"{part!r} is not in: {raised.value}"


def makes_mistake(
    rank: int, world: int, module: str, table: str, case: str, everybody: bool, gradient: bool = False
) -> None:
    """Makes the mistake ``case`` of a table of ``module``, on all ranks or on the last."""
    mistake: Mistake = getattr(importlib.import_module(module), table)[case]
    if everybody or rank == world - 1:
        with inputs_need_gradient(gradient):
            assert_raises(mistake.call, mistake.error, *mistake.words)
    # A rank that had sent something would now be one collective ahead.
    assert funcol.all_reduce(torch.tensor(1.0), "sum", world_group()).item() == world


by_all_or_one = pytest.mark.parametrize("everybody", [True, False], ids=["all ranks", "one rank"])

with_and_without_gradient = pytest.mark.parametrize("gradient", [False, True], ids=["", "gradient"])


# A rank that hangs is one that had sent something.
TIMEOUT_S = 30


# Groups


WRONG_GROUPS: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "unknown name": (lambda: "nobody", ValueError, ("'nobody'",)),
    "non-member": (
        lambda: dist.GroupMember.NON_GROUP_MEMBER,
        ValueError,
        ("this rank does not belong", "NON_GROUP_MEMBER"),
    ),
    "list without this rank": (lambda: [7, 8], ValueError, ("rank ", "[7, 8]")),
    "lists without this rank": (lambda: [[7, 8], [9, 10]], ValueError, ("rank ", "[[7, 8], [9, 10]]")),
    "lists of several sizes": (lambda: [[0, 1], [2]], ValueError, ("[[0, 1], [2]]", "sizes [1, 2]")),
    "list that is no group": (lambda: [dist.get_rank(), 7], ValueError, ("no process group", "7]")),
    "list with an unknown tag": (lambda: [0, 1], ValueError, ("no process group", "'unheard of'")),
    "mesh of two dims": (
        lambda: init_device_mesh(device_type(), (2, 1)),
        ValueError,
        ("2 dims", "expected 1"),
    ),
    "mesh dim out of range": (
        lambda: (init_device_mesh(device_type(), (2,)), 1),
        ValueError,
        ("mesh dim 1",),
    ),
    "tuple of other things": (
        lambda: (world_group(), 0),
        ValueError,
        ("expected (DeviceMesh, int or name)",),
    ),
    "name of no mesh dim": (
        lambda: (init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",)), "tp"),
        ValueError,
        ("no dim named 'tp'", "its dims are dp"),
    ),
    "name of a dim of a mesh without names": (
        lambda: (init_device_mesh(device_type(), (2,)), "tp"),
        ValueError,
        ("no dim named 'tp'", "its dims have no names"),
    ),
    "number": (lambda: 3.5, TypeError, ("float",)),
}


# Reduce ops


def can_need_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


WRONG_REDUCE_OPS: dict[str, tuple[Any, torch.dtype, type[Exception], tuple[str, ...]]] = {
    "unknown": ("mean", torch.float32, ValueError, ("'mean'", "sum, avg")),
    "empty name": ("", torch.float32, ValueError, ("''",)),
    "no factor": ("premul_sum", torch.float32, ValueError, ("'premul_sum'", "factor")),
    "number": (5, torch.float32, TypeError, ("int", "ReduceOp")),
    "nothing": (None, torch.float32, TypeError, ("NoneType", "ReduceOp")),
    **{
        f"{op} on {dtype}": (op, dtype, TypeError, (f"'{op}'", scalar_type))
        for op in ("band", "bor", "bxor")
        for dtype, scalar_type in ((torch.float32, "Float"), (torch.bfloat16, "BFloat16"))
    },
    "avg on bool": ("avg", torch.bool, TypeError, ("'avg'", "bool")),
    "avg on int32": ("avg", torch.int32, TypeError, ("average", "Int")),
    "avg on uint8": ("avg", torch.uint8, TypeError, ("average", "Byte")),
    "avg object on int64": (dist.ReduceOp.AVG, torch.int64, TypeError, ("average", "Long")),
    **{
        f"{op} on complex64": (op, torch.complex64, TypeError, (f"'{op}'", "complex"))
        for op in ("min", "max", "product", "band", "bor", "bxor")
    },
    "sum on int16": ("sum", torch.int16, TypeError, ("cannot reduce", "Short")),
    "sum on uint16": ("sum", torch.uint16, TypeError, ("cannot reduce", "UInt16")),
    "sum on float8": ("sum", torch.float8_e4m3fn, TypeError, ("cannot reduce", "Float8_e4m3fn")),
}
