"""Collectives under a torch function mode: it sees the operators that it sees in stock; nothing waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from ranks import on_ranks
from tensor_kinds import OF_STOCK, SIZE
from torch import Tensor
from torch.overrides import TorchFunctionMode

import funcol
from funcol import _C

WORLD = 2


class Recording(TorchFunctionMode):
    """Notes the collectives that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("_c10d_functional.") and "wait" not in name and "wrap" not in name:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class Doubling(Recording):
    """Doubles what collectives return."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        return result * 2 if str(func) == "_c10d_functional.all_reduce" else result


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("cpu")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def all_of_them() -> Iterator[None]:
    with default_device(), Recording(), torch.device("cpu"):
        yield


DEVICE_MODES: dict[str, Callable[[], Any]] = {
    "with torch.device": lambda: torch.device("cpu"),
    "set_default_device": default_device,
}
MODES: dict[str, Callable[[], Any]] = {**DEVICE_MODES, "recording": Recording, "several": all_of_them}
for_each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
# PyTorch copies gathers and scatters along other dims, and the copies wait.
STARTS = {name: call for name, call in OF_STOCK.items() if "dim 1" not in name}


def numbers() -> Tensor:
    return torch.ones(SIZE, SIZE)


@pytest.mark.usefixtures("fake_world")
@for_each_mode
@pytest.mark.parametrize("call", STARTS.values(), ids=STARTS.keys())
def test_results_are_pending(call: Callable[[Any, Tensor], Any], mode: Callable[[], Any]) -> None:
    x = numbers()
    with mode():
        result = call(funcol, x)
    assert funcol.is_pending(result)
    funcol.wait_tensor(result)


@pytest.mark.usefixtures("fake_world", "_installed")
@for_each_mode
def test_results_are_pending_under_install(mode: Callable[[], Any]) -> None:
    x = numbers()
    with mode():
        result = stock.all_reduce(x, "sum", dist.group.WORLD)
    assert funcol.is_pending(result)
    funcol.wait_tensor(result)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("call", OF_STOCK.values(), ids=OF_STOCK.keys())
def test_a_mode_sees_the_operators_that_it_sees_in_stock(call: Callable[[Any, Tensor], Any]) -> None:
    x = numbers()
    with Recording() as ours:
        funcol.wait_tensor(call(funcol, x))
    with Recording() as theirs:
        funcol.wait_tensor(call(stock, x))
    assert ours.seen == theirs.seen
    assert len(ours.seen) == 1


@pytest.mark.usefixtures("fake_world")
def test_a_mode_may_change_the_result() -> None:
    x = numbers()
    with Doubling():
        assert funcol.all_reduce(x, "sum", dist.group.WORLD).tolist() == (x * 2).tolist()


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mode", DEVICE_MODES.values(), ids=DEVICE_MODES.keys())
def test_a_mode_that_only_names_a_device_is_not_asked(mode: Callable[[], Any]) -> None:
    x = numbers()
    with mode():
        assert _C.all_reduce(x, "sum", dist.group.WORLD, "") is not NotImplemented
        assert _C.all_reduce_into(x, "sum", dist.group.WORLD, "") is None


@pytest.mark.usefixtures("fake_world")
def test_another_mode_beside_it_is() -> None:
    x = numbers()
    with all_of_them():
        assert _C.all_reduce(x, "sum", dist.group.WORLD, "") is NotImplemented
        with torch._C.DisableTorchFunction():
            assert _C.all_reduce(x, "sum", dist.group.WORLD, "") is not NotImplemented


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", [call for call in OF_STOCK if call != "broadcast from the last"])
@on_ranks(2)
def test_values_and_gradients_are_those_without_a_mode(rank: int, world: int, mode: str, call: str) -> None:
    def run() -> list[Tensor]:
        x = (numbers() + rank).requires_grad_()
        result = OF_STOCK[call](funcol, x * 2)
        (result**2).sum().backward()
        return [result.detach(), x.grad]

    expected = run()
    with MODES[mode]():
        actual = run()
    for one, other in zip(actual, expected, strict=True):
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, timeout=30)
def test_a_call_returns_before_its_peer_has_come(rank: int, world: int, mode: str) -> None:
    x = torch.full((4,), float(rank))
    ready = torch.zeros(1)
    if rank == 1:
        dist.recv(ready, 0)  # which rank 0 sends when the call has returned
    with MODES[mode]():
        total = funcol.all_reduce(x, "sum", list(range(world)))
    if rank == 0:
        dist.send(ready, 1)
    assert total.tolist() == [1.0] * 4


@pytest.mark.usefixtures("fake_world", "_fresh_compiler")
@pytest.mark.parametrize("mode", DEVICE_MODES.values(), ids=DEVICE_MODES.keys())
def test_compiled_regions_hold_the_operators(mode: Callable[[], Any]) -> None:
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def region(x: Tensor) -> Tensor:
        return funcol.all_reduce(x * 2, "sum", group) + 1

    x = numbers()
    with mode():
        assert region(x).tolist() == (x * 2 + 1).tolist()
