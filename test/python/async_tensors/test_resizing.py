"""Memory that a collective writes to is replaced only once it has written."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import funcol
from funcol import _C
from funcol._C import make_pending

NUMBERS = [1.0, 2.0, 3.0, 4.0]


class Collective:
    """Writes ``NUMBERS`` into memory whose address it took when it was started, as backends do.

    That memory must not have been freed or replaced when it writes: it then still belongs to the tensor.
    """

    def __init__(self) -> None:
        self.num_waits = 0
        self._output = torch.full((len(NUMBERS),), float("nan"))
        self._address = self._output.data_ptr()
        (self.tensor,) = make_pending([self._output], self._finish)

    def _finish(self) -> None:
        self.num_waits += 1
        assert self._output.untyped_storage().data_ptr() == self._address, "the memory was replaced"
        values = np.array(NUMBERS, dtype=np.float32)
        ctypes.memmove(self._address, values.ctypes.data, values.nbytes)


@contextlib.contextmanager
def hidden_wake_key() -> Iterator[None]:
    """Hides the wake key, as while a compiled callable runs."""
    before = _C.exclude_wake_key(True)
    try:
        yield
    finally:
        _C.exclude_wake_key(before)


MODES = {"eager": contextlib.nullcontext, "compiled": hidden_wake_key}
in_both_modes = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())


def swapped_with(x: Tensor) -> Tensor:
    other = torch.zeros(1)
    torch.utils.swap_tensors(other, x)
    return other


def taken_as_data(x: Tensor) -> Tensor:
    other = torch.zeros(1)
    other.data = x
    return other


def set_from(x: Tensor) -> Tensor:
    return torch.zeros(1).set_(x)


def grown_in_storage(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(64)
    return x


# Each returns a tensor that starts with the numbers.
KEEPING: dict[str, Callable[[Tensor], Tensor]] = {
    "resize_": lambda x: x.resize_(9),
    "resize_ of a view": lambda x: x.view(2, 2).resize_(3, 3),
    "resize_ of a detached": lambda x: x.detach().resize_(9),
    "resize_ with strides": lambda x: torch._C._VariableFunctions.as_strided_(x.resize_(20), (9,), (1,)),
    "resize_as_": lambda x: x.resize_as_(torch.zeros(5, 5)),
    "twice": lambda x: x.resize_(9).resize_(900),
    "untyped_storage().resize_": grown_in_storage,
    "set_": set_from,
    "swap_tensors": swapped_with,
    "data =": taken_as_data,
}


@in_both_modes
@pytest.mark.parametrize("grow", KEEPING.values(), ids=KEEPING.keys())
def test_what_arrives_is_kept_when_memory_is_replaced(
    grow: Callable[[Tensor], Tensor], mode: Callable[[], Any]
) -> None:
    collective = Collective()
    with mode():
        grown = grow(collective.tensor)
    assert grown.reshape(-1)[: len(NUMBERS)].tolist() == NUMBERS
    assert collective.num_waits == 1


@in_both_modes
def test_a_tensor_that_shrinks_stays_pending(mode: Callable[[], Any]) -> None:
    collective = Collective()
    with mode():
        collective.tensor.resize_(2)
    assert collective.tensor.tolist() == NUMBERS[:2]
    assert collective.num_waits == 1


@in_both_modes
def test_memory_that_two_collectives_write_to_grows_after_both(mode: Callable[[], Any]) -> None:
    waits = []
    buffer = torch.zeros(4)
    first, second = (
        make_pending([part], lambda name=name: waits.append(name))[0]
        for name, part in {"first": buffer[:2], "second": buffer[2:]}.items()
    )
    with mode():
        first.resize_(100)
    assert sorted(waits) == ["first", "second"]
    assert not funcol.is_pending(second)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_collectives_on_one_memory_may_end_in_any_order(order: tuple[int, ...]) -> None:
    waits: list[int] = []
    buffer = torch.zeros(6)
    parts = [make_pending([buffer[2 * i : 2 * i + 2]], lambda i=i: waits.append(i))[0] for i in range(3)]
    for i in order[:2]:
        funcol.wait_tensor(parts[i])
    with hidden_wake_key():
        parts[order[2]].resize_(100)
    assert waits == list(order)
    buffer.resize_(200)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_memory_of_a_failed_collective_is_not_replaced(mode: Callable[[], Any]) -> None:
    def fail() -> None:
        raise ValueError("the network is down")

    (failed,) = make_pending([torch.zeros(4)], fail)
    for size in (100, 200):
        with mode(), pytest.raises(RuntimeError, match="the network is down"):
            failed.resize_(size)


def test_memory_may_grow_when_a_dropped_result_is_gone() -> None:
    buffer = torch.zeros(4)
    make_pending([buffer], lambda: None)
    assert buffer.resize_(100).shape == (100,)


@pytest.mark.on_devices_too
@on_ranks(2)
def test_a_result_may_grow_in_a_compiled_region(rank: int, world: int) -> None:
    size = 1 << 20

    @torch.compile(backend="eager")
    def region(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x.resize_(2 * size)

    for _ in range(3):
        if rank == 1:
            torch.ones(3000, 3000).sum()  # so that rank 0 is there first
        pending = funcol.all_reduce(torch.arange(size, dtype=torch.float32), "sum", list(range(world)))
        assert torch.equal(region(pending)[:size], torch.arange(size, dtype=torch.float32) * world)


def samples_with_one_large_result(op: OpInfo) -> Iterator[tuple[SampleInput, Tensor]]:
    for sample in op.sample_inputs("cpu", torch.float32):
        result = op(sample.input, *sample.args, **sample.kwargs)
        is_large = isinstance(result, Tensor) and result.nbytes > 4 * len(NUMBERS)
        if is_large and result.dtype == torch.float32 and result.layout == torch.strided:
            yield sample, result


def is_right_into(out: Tensor, op: OpInfo, sample: SampleInput, expected: Tensor) -> bool:
    op(sample.input, *sample.args, **sample.kwargs, out=out)
    return out.shape == expected.shape and (
        op.name in WITHOUT_VALUES or torch.equal(out.nan_to_num(), expected.nan_to_num())
    )


WITHOUT_VALUES = {"bernoulli", "empty", "multinomial", "normal"}


def replaces_memory(op: OpInfo, sample: SampleInput, expected: Tensor) -> bool:
    """Returns true if ``op`` replaces the memory of a plain ``out``; some reject one of another size."""
    out = torch.full((len(NUMBERS),), float("nan"))
    before = out.untyped_storage().nbytes()
    try:
        return is_right_into(out, op, sample, expected) and out.untyped_storage().nbytes() > before
    except (RuntimeError, TypeError):
        return False


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_operators_wait_for_the_out_that_they_make_larger() -> None:
    num_checked = 0
    wrong = []
    for op in op_db:
        if not op.supports_out or torch.float32 not in op.dtypes:
            continue
        for sample, expected in itertools.islice(samples_with_one_large_result(op), 1):
            if replaces_memory(op, sample, expected):
                num_checked += 1
                collective = Collective()
                with hidden_wake_key():
                    is_right = is_right_into(collective.tensor, op, sample, expected)
                if not is_right or collective.num_waits != 1:
                    wrong.append(op.formatted_name)
    assert wrong == []
    assert num_checked > 200
