"""Functions that a program replaced in PyTorch before install() stay in effect and are called."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed._functional_collectives as stock
from differential import world_group
from programs import mesh_of
from ranks import on_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, _redistribute, distribute_tensor, placement_types

import funcol
from funcol import installation
from funcol.commands.info import info
from funcol.installation import install_dtensor

calls: list[str] = []


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return wrapper


def within_another(function: Callable[..., Any]) -> Callable[..., Any]:
    def another(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return another


def told(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    calls.append(function.__name__)
    return function(*args, **kwargs)


def partially(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(told, function)


class Wrapper:
    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return told(self._function, *args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)


KINDS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "functools.wraps": wrapped,
    "a function of its own": within_another,
    "functools.partial": partially,
    "an object": Wrapper,
}
PLACES: dict[str, list[tuple[Any, str]]] = {
    "a collective": [(stock, "all_reduce")],
    "methods of DTensor": [(DTensor, "to_local"), (DTensor, "redistribute"), (DTensor, "full_tensor")],
    "from_local": [(DTensor, "from_local")],
    "redistribution": [(_redistribute, "redistribute_local_tensor")],
    "a placement": [(placement_types.Shard, "_to_replicate_tensor")],
}


@contextmanager
def put(kind: str, place: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name in PLACES[place]:
            held = vars(owner).get(name)
            if isinstance(held, staticmethod):
                stack.enter_context(patch.object(owner, name, staticmethod(KINDS[kind](held.__func__))))
            elif held is not None:  # this release has it
                stack.enter_context(patch.object(owner, name, KINDS[kind](held)))
        calls.clear()
        yield


def program() -> list[Tensor]:
    mesh = mesh_of(2)
    x = distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0)])
    x = x + x.sin()
    x.add_(1)
    moved = x.redistribute(placements=[Shard(1)])
    whole = moved.full_tensor()
    local = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)]).to_local()
    return [whole, local, stock.all_reduce(local, "sum", world_group()) + 0]


CASES = [
    (kind, place)
    for kind in KINDS
    for place in PLACES
    # A partial is not a method.
    if kind != "functools.partial" or place in ("a collective", "redistribution", "from_local")
]


@pytest.mark.parametrize(("kind", "place"), CASES)
@on_ranks(2)
def test_it_is_called_as_often_as_without_funcol(rank: int, world: int, kind: str, place: str) -> None:
    with put(kind, place):
        expected = program()
        counted = sorted(calls)
        assert counted
        calls.clear()
        with funcol.installed():
            results = program()
            assert sorted(calls) == counted
            assert funcol.is_pending(stock.broadcast(results[0], 0, world_group()))
        for result, other in zip(results, expected, strict=True):
            assert torch.equal(result, other)
    calls.clear()
    program()
    assert calls == []


@pytest.mark.parametrize(("kind", "place"), CASES)
def test_installing_and_uninstalling_leaves_it(kind: str, place: str) -> None:
    with put(kind, place):
        before = [vars(owner).get(name) for owner, name in PLACES[place]]
        with funcol.installed():
            assert [vars(owner).get(name) for owner, name in PLACES[place]] == before
        assert [vars(owner).get(name) for owner, name in PLACES[place]] == before


def row(name: str) -> str:
    (found,) = [line for line in info().splitlines() if line.startswith(name)]
    return found.removeprefix(name).strip()


@pytest.mark.parametrize("installed", [False, True])
def test_info_tells_of_it(installed: bool) -> None:
    with (
        put("functools.wraps", "a collective"),
        put("functools.wraps", "redistribution"),
        ExitStack() as stack,
    ):
        if installed:
            stack.enter_context(funcol.installed())
        theirs = f"{__name__}.wrapped.<locals>.wrapper in the place of"
        assert row("kept from programs") == (
            f"{theirs} all_reduce, {theirs} _redistribute.redistribute_local_tensor"
        )


@pytest.mark.parametrize("installed", [False, True])
def test_info_tells_of_nothing_where_there_is_nothing(installed: bool) -> None:
    with ExitStack() as stack:
        if installed:
            stack.enter_context(funcol.installed())
        assert row("kept from programs") == "nothing"


# In a process of its own, since PyTorch looks methods of the dispatcher up once.
WRAPPED_DISPATCHER = """
import functools
import torch, funcol
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dispatch import OpDispatcher

calls = []

def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)
    return wrapper

for name in ("_unwrap_to_op_info_impl", "_dispatch_fast_path_python_tail", "wrap"):
    held = vars(OpDispatcher).get(name)
    if isinstance(held, staticmethod):
        setattr(OpDispatcher, name, staticmethod(wrapped(held.__func__)))
    elif held is not None:
        setattr(OpDispatcher, name, wrapped(held))

dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

def called():
    calls.clear()
    x = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
    (x + x).add_(1)
    return sorted(calls)

expected = called()
assert expected
with funcol.installed():
    assert called() == expected
assert called() == expected
"""


def test_wrappers_of_the_dispatcher_are_called_as_often_as_without_funcol() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRAPPED_DISPATCHER], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


# All or nothing


class PlannedError(Exception):
    pass


def fails(*arguments: object) -> None:
    raise PlannedError


def of_dtensor() -> list[Any]:
    return [(theirs, theirs.__code__, theirs.__kwdefaults__) for theirs, _ in install_dtensor._FUNCTIONS]


@pytest.mark.parametrize("how", [funcol.install, lambda: funcol.installed().__enter__()])
def test_an_installation_that_fails_under_dtensor_undoes_itself(how: Callable[[], object]) -> None:
    before = of_dtensor(), stock.all_reduce, DTensor._op_dispatcher.sharding_propagator
    with patch.object(install_dtensor, "_install_propagator", fails), pytest.raises(PlannedError):
        how()
    assert (installation.is_installed(), installation.is_under_dtensor()) == (False, False)
    assert (of_dtensor(), stock.all_reduce, DTensor._op_dispatcher.sharding_propagator) == before
    with funcol.installed(dtensor=False):  # without DTensor, which failed
        assert not installation.is_under_dtensor()
    assert not installation.is_installed()


def test_what_was_installed_before_stays_where_more_fails() -> None:
    with funcol.installed(dtensor=False):
        with patch.object(install_dtensor, "_install_propagator", fails), pytest.raises(PlannedError):
            funcol.install()
        assert (installation.is_installed(), installation.is_under_dtensor()) == (True, False)
    assert not installation.is_installed()
