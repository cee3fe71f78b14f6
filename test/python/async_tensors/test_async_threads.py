"""Pending tensors used by several threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from processes import end_of, start_process
from slow_collectives import SlowCollective, same, values
from tensor_reads import VIEWS
from torch import Tensor

import funcol

USE_IN_THREADS = """
import sys, threading, time
import torch, funcol
from slow_collectives import SlowCollective, dispatch_keys, same, values

NUM_THREADS = 8
sys.setswitchinterval(1e-4)

class SlowerCollective(SlowCollective):
    num_users = 0
    def _finish(self):
        while self.num_users < NUM_THREADS:
            time.sleep(1e-4)
        super()._finish()

def use_in_thread(get, read):
    tensor = get(collective.tensor)
    barrier.wait()
    with lock:
        collective.num_users += 1
    results.append(read(tensor))

def keep_the_gil_busy():
    while not finished:
        sum(range(100))

finished, lock = False, threading.Lock()
threading.Thread(target=keep_the_gil_busy).start()
try:
    for read in (torch.sum, torch.Tensor.numpy, torch.Tensor.tolist, repr, torch.clone, funcol.wait_tensor):
        expected = read(USES[0](values()))
        for _ in range(4):
            collective, barrier, results = SlowerCollective(values()), threading.Barrier(NUM_THREADS), []
            threads = [
                threading.Thread(target=use_in_thread, args=(USES[i % len(USES)], read))
                for i in range(NUM_THREADS)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(results) == NUM_THREADS and all(same(r, expected) for r in results), results
            assert collective.num_waits == 1, collective.num_waits
            assert not funcol.is_pending(collective.tensor)
            assert same(collective.tensor * 1, values())
            assert dispatch_keys(collective.tensor) == dispatch_keys(values())
finally:
    finished = True
"""

THREAD_USES = {
    "the_same_tensor": "USES = [lambda t: t]",
    "equal_views": "USES = [lambda t: t.t(), lambda t: t.transpose(0, 1), lambda t: t.mT, lambda t: t.T]",
    "detached_copies": "USES = [lambda t: t.detach(), lambda t: t.data, lambda t: t]",
}


@pytest.mark.parametrize("uses", THREAD_USES.values(), ids=THREAD_USES.keys())
def test_threads_that_use_it_at_once_wait_once_and_do_not_deadlock(uses: str) -> None:
    end_of(start_process(uses + USE_IN_THREADS))


def test_threads_that_view_and_settle_at_once_see_finished_data() -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            tensor = SlowCollective(values()).tensor
            sums = pool.map(lambda view, t=tensor: view(t).sum(), VIEWS.values())
            assert same(list(sums), [view(values()).sum() for view in VIEWS.values()])


def test_threads_may_differ_in_whether_they_see_the_wake_key() -> None:
    def use(hide: bool) -> list[Any]:
        before = funcol._C.exclude_wake_key(hide)
        try:
            return tensor.t().tolist()
        finally:
            funcol._C.exclude_wake_key(before)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            collective = SlowCollective(values())
            tensor = collective.tensor
            assert all(r == values().t().tolist() for r in pool.map(use, [True, False, True, False]))
            assert collective.num_waits == 1


def test_two_threads_may_run_backward_through_one_pending_tensor() -> None:
    weight = SlowCollective(values()).tensor
    inputs = [torch.ones(3, 4, requires_grad=True) for _ in range(4)]
    products = [x * weight.t().t() for x in inputs]
    gradient = SlowCollective(values())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda p: p.backward(gradient.tensor), products))
    assert gradient.num_waits == 1
    assert all(same(x.grad, values() * values()) for x in inputs)


class Nested(torch.autograd.Function):
    """Runs backward inside backward, ``depth`` times; the innermost gradient is pending."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, threads: set[int]) -> Tensor:
        ctx.depth, ctx.threads = depth, threads
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        if ctx.depth == 0:
            ctx.threads.add(threading.get_ident())
            collective = SlowCollective(gradient * 3)
            assert same(collective.tensor.t() * 1, (gradient * 3).t())
            return SlowCollective(gradient * 3).tensor, None, None
        with torch.enable_grad():
            inner = torch.ones(3, 4, requires_grad=True)
            Nested.apply(inner, ctx.depth - 1, ctx.threads).sum().backward()
        return gradient * inner.grad, None, None


def test_it_can_be_made_and_settled_on_a_thread_of_the_autograd_engine() -> None:
    threads: set[int] = set()
    x = torch.ones(3, 4, requires_grad=True)
    # The engine goes on in a thread of its own when backward is nested 60 deep.
    Nested.apply(x, 70, threads).sum().backward()
    assert same(x.grad, torch.full((3, 4), 3.0))
    assert threading.get_ident() not in threads
