"""Pending tensors whose data arrives when a test waits for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import funcol

VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def make_pending(
    buffers: list[Tensor],
    finish: Callable[[], None],
    op: str = "all_reduce",
    group: str = "dp",
    is_completed: bool = False,
) -> list[Tensor]:
    """Pending tensors over ``buffers`` that call ``finish`` when they are waited for.

    ``finish`` is called with the GIL if the Work says that it ``is_completed``, else without it.
    """
    # Results of a collective are not views; aliases of the buffers would be.
    with torch._C._ExcludeDispatchKeyGuard(VIEW_TRACKING):
        return funcol._C.make_pending(buffers, finish, op, group, is_completed)


def garbage_like(values: Tensor) -> Tensor:
    if values.dtype == torch.bool:
        return ~values
    return torch.full_like(values, float("nan") if values.is_floating_point() or values.is_complex() else -99)


class SlowCollective:
    """A collective whose results hold garbage until it is waited for, and ``values`` from then on."""

    def __init__(self, *values: Tensor, is_completed: bool = False) -> None:
        self.num_waits = 0
        self._values = [value.detach().clone() for value in values]
        self._buffers = [garbage_like(value) for value in self._values]
        self.tensors = make_pending(self._buffers, self._finish, is_completed=is_completed)

    def _finish(self) -> None:
        self.num_waits += 1
        for buffer, value in zip(self._buffers, self._values, strict=True):
            # No operator, so that no mode sees the data arrive: it comes as from a network.
            ctypes.memmove(buffer.data_ptr(), value.data_ptr(), value.nbytes)

    @property
    def tensor(self) -> Tensor:
        return self.tensors[0]


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.arange(1, 13).reshape(3, 4)
    return numbers % 2 == 0 if dtype == torch.bool else numbers.to(dtype)


def dispatch_keys(tensor: Tensor) -> str:
    return str(torch._C._dispatch_keys(tensor))


def same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return (
            isinstance(actual, Tensor)
            and actual.dtype == expected.dtype
            and actual.shape == expected.shape
            and actual.tolist() == expected.tolist()
        )
    if isinstance(expected, np.ndarray):
        return isinstance(actual, np.ndarray) and np.array_equal(actual, expected)
    if isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return bool(actual == expected)


class Finish:
    """The callback of a Work's wait. A weak reference to it tells how long the Work lives."""

    def __init__(self, buffer: Tensor | None = None) -> None:
        self.num_calls = 0
        self.buffer = buffer

    def __call__(self) -> None:
        self.num_calls += 1
        if self.buffer is not None:
            self.buffer.fill_(7)
