"""Pending tensors used by several threads at once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import comes_true, end_of, start_process
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


EXIT_WHILE_A_THREAD_WAITS = """
import ctypes, os, sys, threading, time, types
import torch, torch.distributed as dist, funcol
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
rank, store, use, when = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

class Last:
    # Runs when the interpreter drops its modules: from then on no other thread gets the GIL. The peer sends
    # what the thread waits for, and says when it has.
    def __del__(self, store=store, when=when, mkdir=os.mkdir, access=os.access, sleep=time.sleep):
        mkdir(store + ".exiting")
        while when == "exiting" and not access(store + ".sent", 0):
            sleep(0.01)
        sleep(0.2)  # for the thread to wake

if rank == 0:
    if use == "DTensor":
        funcol.install()
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        parts = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        pending = parts.redistribute(placements=[Replicate()], async_op=True)
    else:
        pending = funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    uses = {
        "read": lambda: pending.tolist(),
        "wait": lambda: funcol.wait_tensor(pending),
        "operator": lambda: pending + 1,
        "operator in place": lambda: pending.add_(1),
        "gradient": lambda: (torch.ones(4, requires_grad=True) * pending).sum().backward(),
        "DTensor": lambda: pending + 1,
    }
    started = threading.Event()

    def wait():
        started.set()
        uses[use]()

    threading.Thread(target=wait, daemon=True).start()
    started.wait()
    time.sleep(1)  # for the thread to wait
    if when == "exited":
        # Keeps the process after the interpreter's end until its input is closed. The peer sends before that.
        ctypes.CDLL(None).on_exit(ctypes.CDLL(None).getchar, None)
    sys.modules["last"] = types.ModuleType("last")
    sys.modules["last"].last = Last()
else:
    while not os.path.exists(store + ".exiting"):
        time.sleep(0.01)
    if when == "exited":
        time.sleep(0.7)
    dist.all_reduce(torch.ones(4))
    os.mkdir(store + ".sent")
    os._exit(0)  # at a usual exit gloo's thread may still free tensors, for which PyTorch asks for the GIL
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("when", ["exiting", "exited"])
@pytest.mark.parametrize("use", ["read", "wait", "operator", "operator in place", "gradient", "DTensor"])
def test_process_exits_while_a_daemon_thread_waits(use: str, when: str, tmp_path: Path) -> None:
    if use == "DTensor" and torch.__version__ < "2.15":
        pytest.skip("older PyTorch releases destroy Python objects on the thread that Python ends")
    store = str(tmp_path / "store")
    ranks = [start_process(EXIT_WHILE_A_THREAD_WAITS, str(rank), store, use, when) for rank in range(2)]
    assert comes_true(lambda: Path(f"{store}.sent").exists())
    time.sleep(0.5)  # for the thread to wake
    for process in ranks:
        _, complaints = end_of(process)
        assert process.returncode == 0, complaints
        assert "terminate" not in complaints
