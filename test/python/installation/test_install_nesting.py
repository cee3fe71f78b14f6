"""funcol.install() twice, nested, and from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from ranks import on_ranks
from torch_state import attributes_of_torch, kernels_of

import funcol
from funcol import _C, installation

OPS = _C.ops_with_core_kernels()


pytestmark = pytest.mark.usefixtures("_not_installed")


def test_uninstalling_once_undoes_installing_twice() -> None:
    before = attributes_of_torch()
    funcol.install()
    funcol.install()
    funcol.uninstall()
    assert attributes_of_torch() == before


def test_uninstalling_what_is_not_installed_does_nothing() -> None:
    before = attributes_of_torch()
    funcol.uninstall()
    assert attributes_of_torch() == before


def test_installing_again_works() -> None:
    funcol.install()
    funcol.uninstall()
    funcol.install()
    assert stock.all_reduce is funcol.all_reduce


def test_leaving_an_inner_context_leaves_it_installed() -> None:
    with funcol.installed():
        with funcol.installed():
            pass
        assert installation.is_installed()
    assert not installation.is_installed()


def test_leaving_a_context_inside_an_installation_leaves_it_installed() -> None:
    funcol.install()
    with funcol.installed():
        pass
    assert installation.is_installed()


def test_what_was_installed_inside_a_context_stays() -> None:
    with funcol.installed():
        funcol.install()
    assert installation.is_installed()


def test_uninstalling_inside_contexts_ends_them_all() -> None:
    with funcol.installed(), funcol.installed():
        funcol.uninstall()
        assert not installation.is_installed()


def test_a_context_that_was_ended_inside_leaves_a_later_one_alone() -> None:
    ended = funcol.installed()
    ended.__enter__()
    funcol.uninstall()
    with funcol.installed():
        ended.__exit__(None, None, None)
        assert installation.is_installed()


def test_an_error_inside_a_context_uninstalls() -> None:
    with pytest.raises(KeyError), funcol.installed():
        raise KeyError
    assert not installation.is_installed()


def test_a_context_of_one_thread_outlives_that_of_another() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with funcol.installed():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with funcol.installed():
        thread.start()
        entered.wait()
    still = installation.is_installed()
    leave.set()
    thread.join()
    assert (still, installation.is_installed()) == (True, False)


@pytest.mark.parametrize("last", [funcol.install, funcol.uninstall])
def test_many_threads_at_once_leave_one_whole_state(last: Callable[[], None]) -> None:
    before = attributes_of_torch(), [kernels_of(op) for op in OPS]
    barrier = threading.Barrier(4)

    def toggle() -> None:
        barrier.wait()
        for _ in range(10):
            funcol.install()
            with funcol.installed():
                pass
            funcol.uninstall()

    threads = [threading.Thread(target=toggle) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last()
    assert installation.is_installed() == (stock.all_reduce is funcol.all_reduce) == (last is funcol.install)
    funcol.uninstall()
    assert (attributes_of_torch(), [kernels_of(op) for op in OPS]) == before


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_collectives_in_flight_do_not_mind(rank: int, world: int) -> None:
    # Groups of their own: the ranks' threads must call in the same order.
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    done = threading.Event()
    failures: list[BaseException] = []

    def reduce(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        try:
            for step in range(60):
                x = torch.full((3,), float(step + rank))
                assert call(x).tolist() == [float(step * world + sum(range(world)))] * 3
        except BaseException as failure:
            failures.append(failure)

    def by_function(x: torch.Tensor) -> torch.Tensor:
        return stock.all_reduce(x, "sum", groups[0]) + 0

    def by_operator(x: torch.Tensor) -> torch.Tensor:
        reduced = torch.ops._c10d_functional.all_reduce(x, "sum", groups[1].group_name)
        return torch.ops._c10d_functional.wait_tensor(reduced)

    def toggle() -> None:
        while not done.is_set():
            with funcol.installed():
                pass

    toggling = threading.Thread(target=toggle)
    toggling.start()
    reducing = [threading.Thread(target=reduce, args=(call,)) for call in (by_function, by_operator)]
    for thread in reducing:
        thread.start()
    for thread in reducing:
        thread.join()
    done.set()
    toggling.join()
    assert failures == []
