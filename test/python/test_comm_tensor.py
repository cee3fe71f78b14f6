"""A CommTensor handed to an in-place collective waits by itself, whatever reads it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_async_tensor import READS, READS_OF_A_VIEW, garbage_like, same, values
from torch import Tensor

import funcol


class SlowInPlace:
    """A CommTensor with a collective on it that fills in ``values`` when somebody waits for it."""

    def __init__(self, values: Tensor) -> None:
        self.num_waits = 0
        self._values = values.detach().clone()
        self._buffer = garbage_like(self._values)
        self.tensor = funcol.CommTensor(self._buffer)
        funcol._C.make_pending_in_place([self.tensor], self._finish, "all_reduce", "dp")

    def _finish(self) -> None:
        self.num_waits += 1
        # As a network would: no operator, so that no mode which is active by now has a say.
        ctypes.memmove(self._buffer.data_ptr(), self._values.data_ptr(), self._values.nbytes)


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.filterwarnings("ignore")
def test_every_read_sees_finished_data(read: Callable[[Tensor], Any]) -> None:
    assert same(read(SlowInPlace(values()).tensor), read(values()))


@pytest.mark.parametrize("read", READS_OF_A_VIEW.values(), ids=READS_OF_A_VIEW.keys())
@pytest.mark.filterwarnings("ignore")
def test_every_read_of_a_view_sees_finished_data(read: Callable[[Tensor], Any]) -> None:
    collective = SlowInPlace(torch.stack([values(), values() + 100]).transpose(1, 2))
    assert same(read(collective.tensor.transpose(1, 2)[0]), read(values()))


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.filterwarnings("ignore")
def test_reads_before_any_collective_see_what_is_there(read: Callable[[Tensor], Any]) -> None:
    assert same(read(funcol.CommTensor(values())), read(values()))


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.filterwarnings("ignore")
def test_reads_after_the_wait_are_those_of_a_plain_tensor(read: Callable[[Tensor], Any]) -> None:
    collective = SlowInPlace(values())
    funcol.wait_tensor(collective.tensor)
    assert same(read(collective.tensor), read(values()))
    assert collective.num_waits == 1
