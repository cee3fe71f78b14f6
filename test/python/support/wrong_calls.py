"""Wrong calls of collectives as data, and the errors that they raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from differential import world_group
from ranks import device_type
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import funcol

NUM_RANKS = 2

# A rank that hangs is one that had sent something.
TIMEOUT_S = 30

by_all_or_one = pytest.mark.parametrize("everybody", [True, False], ids=["all ranks", "one rank"])

with_and_without_gradient = pytest.mark.parametrize("gradient", [False, True], ids=["", "gradient"])


# Inputs


class Inputs(NamedTuple):
    """Properties of the tensors that ``ones`` makes."""

    needs_gradient: bool = False
    device: str | None = None  # None: that of the ranks


_inputs = Inputs()


@contextmanager
def inputs(mode: str) -> Iterator[None]:
    """Sets the inputs of calls: ``eager``, ``gradient`` (calls go through autograd), ``meta`` or ``fake``."""
    global _inputs
    _inputs = Inputs(mode == "gradient", "meta" if mode == "meta" else None)
    try:
        with FakeTensorMode() if mode == "fake" else nullcontext():
            yield
    finally:
        _inputs = Inputs()


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=_inputs.device, requires_grad=_inputs.needs_gradient)


# Calls


class Ones(NamedTuple):
    """An argument: a tensor of ones, made when the call is."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    is_transposed: bool = False

    def made(self) -> torch.Tensor:
        tensor = ones(*self.shape, dtype=self.dtype)
        return tensor.t() if self.is_transposed else tensor


class Named(NamedTuple):
    """An argument that is known on a rank of a group."""

    value: Callable[[], Any]

    def made(self) -> Any:
        return self.value()


GROUP = Named(world_group)
NAME = Named(lambda: world_group().group_name)
THIS_RANK = Named(dist.get_rank)
OTHER_RANK = Named(lambda: 1 - dist.get_rank())


def t(*shape: int, **how: Any) -> Ones:
    return Ones(shape, **how)


def made(argument: Any) -> Any:
    """Returns the argument of a call, with its tensors and groups."""
    if isinstance(argument, Ones | Named):
        return argument.made()
    return [made(one) for one in argument] if type(argument) is list else argument


class WrongCall(NamedTuple):
    """A call of ``function`` and its error, whose message has all ``words``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    error: type[Exception]
    words: tuple[str, ...]

    def raises(self) -> None:
        keywords = {name: made(value) for name, value in self.keywords.items()}
        arguments = [made(argument) for argument in self.arguments]
        assert_raises(lambda: self.function(*arguments, **keywords), self.error, *self.words)


class Refused(NamedTuple):
    """The error of a wrong call: ``Refused(ValueError, "dim 0").of("all_gather_tensor", t(3), 2)``."""

    error: type[Exception]
    words: tuple[str, ...]

    def of(self, name: str, *arguments: Any, op: str | None = None, **keywords: Any) -> WrongCall:
        """Returns a call of a function, on the default group without ``group``. The error names ``op``."""
        group = {} if "group" in keywords else {"group": GROUP}
        words = (f"funcol::{op or name}", *self.words)
        return WrongCall(getattr(funcol, name), arguments, keywords | group, self.error, words)

    def of_op(self, name: str, *arguments: Any, op: str | None = None, **keywords: Any) -> WrongCall:
        """Returns a call of an operator; NAME stands for the group among its arguments."""
        words = (f"funcol::{op or name}", *self.words)
        function = getattr(torch.ops.funcol, name)
        return WrongCall(function, arguments, keywords, self.error, words)


def says(error: type[Exception], *words: str) -> Refused:
    return Refused(error, words)


def assert_raises(call: Callable[[], Any], error: type[Exception], *words: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error, repr(raised.value)
    for part in words:
        assert part in str(raised.value), f"{part!r} is not in: {raised.value}"


def makes_wrong_call(rank: int, world: int, call: WrongCall, mode: str, everybody: bool = True) -> None:
    """Makes a wrong call, on all ranks or on the last."""
    if everybody or rank == world - 1:
        with inputs(mode):
            call.raises()
    # A rank that had sent something would now be one collective ahead.
    assert funcol.all_reduce(torch.tensor(1.0), "sum", world_group()).item() == world


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
    "list that is not a group": (lambda: [dist.get_rank(), 7], ValueError, ("no process group", "7]")),
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
