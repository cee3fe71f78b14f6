"""Pending tensors used by several threads, dropped unused, or whose collective fails."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from test_async_tensor import READS, VIEWS, SlowCollective, make_pending, same, values
from torch import Tensor

import funcol


def start_process(code: str, *args: str) -> subprocess.Popen[str]:
    """Starts a process for ``code``, which may deadlock, die, or speak at exit."""
    paths = [str(Path(__file__).parent), *sys.path]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(process: subprocess.Popen[str], timeout: float = 60) -> tuple[str, str]:
    """What the process wrote; raises if it fails or takes more than ``timeout`` seconds."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out, err


USE_IN_THREADS = """
import sys, threading, time
import torch, funcol
from test_async_tensor import SlowCollective, dispatch_keys, same, values

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


class Finish:
    """What a Work calls when it is waited for; can be watched to know how long the Work lives."""

    def __init__(self, buffer: Tensor | None = None) -> None:
        self.num_calls = 0
        self.buffer = buffer

    def __call__(self) -> None:
        self.num_calls += 1
        if self.buffer is not None:
            self.buffer.fill_(7)


def test_a_settled_tensor_keeps_nothing_of_its_collective() -> None:
    buffer = torch.zeros(3)
    finish = Finish(buffer)
    watched = weakref.ref(finish)
    (tensor,) = make_pending([buffer], finish)
    del finish
    assert watched() is not None
    assert tensor.sum() == 21
    assert watched() is None


def test_a_dropped_tensor_neither_waits_nor_leaks() -> None:
    finish = Finish()
    watched = weakref.ref(finish)
    tensors = make_pending([torch.zeros(3), torch.zeros(3)], finish, is_over=True)
    view = tensors[0].view(-1)
    del tensors
    assert funcol._C.num_orphans() == 0
    assert watched() is not None
    del view
    gc.collect()
    assert finish.num_calls == 0
    del finish
    assert funcol._C.num_orphans() == 0
    assert watched() is None


def drops_before_the_peer_joins(rank: int, world: int) -> None:
    group = dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        data = np.ones((2, 3), dtype=np.float32)
        watched = weakref.ref(data)
        result = funcol.all_gather_tensor(torch.from_numpy(data), 0, group)
        assert funcol.is_pending(result)
        del data, result
        gc.collect()
        assert funcol._C.num_orphans() == 1
        assert watched() is not None, "the input was freed while a peer may still read it"
        store.set("dropped", "")
        deadline = time.monotonic() + 30
        while funcol._C.num_orphans() > 0:
            assert time.monotonic() < deadline, "the finished Work is still kept"
        while watched() is not None:  # by gloo's own thread, for a moment longer
            assert time.monotonic() < deadline, "the input of a finished Work is still kept"
    else:
        store.wait(["dropped"])
        gathered = funcol.all_gather_tensor(torch.zeros(2, 3), 0, group)
        assert gathered.tolist() == [[1, 1, 1]] * 2 + [[0, 0, 0]] * 2
    dist.destroy_process_group(group)
    store.delete_key("dropped")


def test_a_collective_whose_result_is_dropped_still_serves_its_peers() -> None:
    run_ranks(drops_before_the_peer_joins, 2)


AT_EXIT = """
import torch, torch.distributed as dist, funcol
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(3):
    funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    funcol.all_gather_tensor(torch.ones(3, 2), 1, dist.group.WORLD)
held = funcol.all_reduce(torch.ones(3), "sum", dist.group.WORLD).view(-1)
never_done = funcol._C.make_pending([torch.ones(3)], lambda: None)
"""


@pytest.mark.parametrize("end", ["dist.destroy_process_group()", ""], ids=["group_destroyed", "group_left"])
def test_a_process_ends_silently_whatever_it_left_unwaited(end: str) -> None:
    assert end_of(start_process(AT_EXIT + end)) == ("", "")


class FailingCollective:
    def __init__(self, error: BaseException | None = None) -> None:
        self.num_waits = 0
        self._error = error or ValueError("the peer is gone")
        (self.tensor,) = make_pending([values()], self._fail, "reduce_scatter_tensor", "tensor parallel")

    def _fail(self) -> None:
        self.num_waits += 1
        raise self._error


WHAT_FAILED = (
    r"(?s)the peer is gone.*reduce_scatter_tensor failed on group 'tensor parallel'; result of shape \[3, 4\]"
)

# PyTorch raises an error of its own, with the message of the first one in it.
REPORTED_BY_PYTORCH = ("operator-jit_script", "python-module_state")


@pytest.mark.parametrize("name", [name for name in READS if name != "raw-swap_tensors"])
@pytest.mark.filterwarnings("ignore")
def test_every_use_of_a_failed_collective_raises_again(name: str) -> None:
    expected = RuntimeError if name in REPORTED_BY_PYTORCH else dist.DistBackendError
    collective = FailingCollective()
    for _ in range(2):
        with pytest.raises(expected, match=WHAT_FAILED):
            same(READS[name](collective.tensor), READS[name](values()))
    assert collective.num_waits == 1


def test_a_failed_collective_still_raises_after_it_was_swapped_into_another_tensor() -> None:
    other = torch.ones(3, 4)
    torch.utils.swap_tensors(FailingCollective().tensor, other)
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match=WHAT_FAILED):
            other.sum()


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("made", ["before", "after"])
def test_every_use_of_a_view_of_a_failed_collective_raises_again(
    view: Callable[[Tensor], Tensor], made: str
) -> None:
    collective = FailingCollective()
    if made == "after":
        with pytest.raises(dist.DistBackendError):
            collective.tensor.sum()
    viewed = view(collective.tensor)
    for use in (torch.sum, torch.Tensor.numpy, torch.Tensor.tolist, Tensor.data_ptr, repr):
        with pytest.raises(dist.DistBackendError, match=WHAT_FAILED):
            use(viewed.detach())
    assert collective.num_waits == 1


def test_the_error_names_operator_group_and_shape() -> None:
    with pytest.raises(dist.DistBackendError) as caught:
        FailingCollective().tensor.sum()
    for part in ("the peer is gone", "funcol::reduce_scatter_tensor", "'tensor parallel'", "[3, 4]"):
        assert part in str(caught.value)


def test_the_error_names_the_shapes_of_all_results() -> None:
    fail = FailingCollective()._fail
    _, second = make_pending([torch.ones(2, 5), torch.ones(7)], fail, "all_reduce_coalesced", "dp")
    with pytest.raises(dist.DistBackendError, match=r"all_reduce_coalesced .* shape \[2, 5\], \[7\]"):
        second.sum()


@pytest.mark.parametrize("raised", [ValueError("no"), RuntimeError("no"), KeyboardInterrupt("no")], ids=repr)
def test_the_error_is_one_of_torch_distributed(raised: BaseException) -> None:
    with pytest.raises(dist.DistBackendError, match="no") as caught:
        FailingCollective(raised).tensor.sum()
    assert isinstance(caught.value, dist.DistError)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize(
    "wait",
    [
        funcol.wait_tensor,
        lambda t: funcol.wait_tensors([t]),
        torch.ops.funcol.wait_tensor,
        torch.ops._c10d_functional.wait_tensor,
        funcol.AsyncCollectiveTensor.trigger_wait,
    ],
    ids=["wait_tensor", "wait_tensors", "op", "core_op", "trigger_wait"],
)
def test_waiting_for_a_failed_collective_raises_again(wait: Callable[[Tensor], Any]) -> None:
    tensor = FailingCollective().tensor
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match="the peer is gone"):
            wait(tensor)


def test_metadata_of_a_failed_collective_can_be_asked_for() -> None:
    tensor = FailingCollective().tensor
    with pytest.raises(dist.DistBackendError):
        tensor.sum()
    assert tensor.shape == (3, 4)
    assert tensor.t().stride() == (1, 4)
    assert isinstance(tensor, funcol.AsyncCollectiveTensor)


def test_a_write_into_a_failed_collective_raises() -> None:
    tensor = FailingCollective().tensor
    for write in (Tensor.zero_, lambda t: t.__setitem__(0, 1.0), lambda t: torch.ones(3, 4, out=t)):
        with pytest.raises(dist.DistBackendError, match="the peer is gone"):
            write(tensor)


def test_all_results_of_a_failed_collective_raise() -> None:
    collective = FailingCollective()
    tensors = make_pending([values(), values()], collective._fail)
    for tensor in tensors * 2:
        with pytest.raises(dist.DistBackendError):
            tensor.sum()
    assert collective.num_waits == 1


def test_each_thread_that_uses_a_failed_collective_gets_the_error() -> None:
    collective = FailingCollective()

    def use(_: int) -> str:
        with pytest.raises(dist.DistBackendError) as caught:
            collective.tensor.view(-1).sum()
        return str(caught.value)

    with ThreadPoolExecutor(8) as pool:
        messages = list(pool.map(use, range(16)))
    assert len(set(messages)) == 1
    assert collective.num_waits == 1


def test_a_failed_collective_keeps_nothing_but_its_error() -> None:
    class Fail(Finish):
        def __call__(self) -> None:
            raise ValueError("no")

    fail = Fail()
    watched = weakref.ref(fail)
    (tensor,) = make_pending([torch.zeros(3)], fail)
    del fail
    with pytest.raises(dist.DistBackendError):
        tensor.sum()
    gc.collect()
    assert watched() is None


def test_an_error_inside_backward_reaches_the_caller() -> None:
    class FailingGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return FailingCollective().tensor

    x = torch.ones(3, 4, requires_grad=True)
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match="the peer is gone"):
            FailingGradient.apply(x * 2).sum().backward()
    assert x.grad is None


def test_an_error_on_a_thread_of_the_autograd_engine_reaches_the_caller() -> None:
    class FailsDeepInside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, depth: int) -> Tensor:
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            if ctx.depth == 0:
                return FailingCollective().tensor * gradient, None
            with torch.enable_grad():
                FailsDeepInside.apply(torch.ones(3, 4, requires_grad=True), ctx.depth - 1).sum().backward()
            return gradient, None

    with pytest.raises(RuntimeError, match="the peer is gone"):
        FailsDeepInside.apply(torch.ones(3, 4, requires_grad=True), 70).sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_error_inside_a_compiled_region_reaches_the_caller(backend: str) -> None:
    double = torch.compile(lambda t: t * 2, backend=backend)
    assert same(double(values()), values() * 2)
    tensor = FailingCollective().tensor
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match="the peer is gone"):
            double(tensor)


def waits_for_a_peer_that_never_calls(rank: int, world: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        result = funcol.all_reduce(torch.ones(2, 3), "sum", group)
        before = time.monotonic()
        for use in (torch.sum, repr, Tensor.numpy):
            with pytest.raises(dist.DistBackendError, match=r"funcol::all_reduce .* shape \[2, 3\]"):
                use(result.t())
        assert time.monotonic() - before < 20
    dist.barrier()


def test_a_peer_that_never_calls_is_an_error_after_the_timeout_of_the_group() -> None:
    run_ranks(waits_for_a_peer_that_never_calls, 2)


LOSE_THE_PEER = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, funcol
rank = int(sys.argv[1])
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=3))
group = dist.group.WORLD
assert funcol.all_reduce(torch.ones(1), "sum", group).item() == 2
if rank == 1:
    os._exit(0)
result = funcol.all_gather_tensor(torch.ones(2, 3), 1, group)
before = time.monotonic()
for use in (torch.sum, repr, torch.Tensor.numpy):
    try:
        use(result)
    except dist.DistBackendError as error:
        assert "funcol::all_gather_into_tensor failed on group '0'; result of shape [2, 6]" in str(error)
    else:
        raise AssertionError("unfinished data was given out")
assert time.monotonic() - before < 30
os._exit(0)  # there is no peer to say goodbye to
"""


def test_a_peer_that_dies_is_an_error_within_the_timeout_of_the_group(tmp_path: Path) -> None:
    processes = [start_process(LOSE_THE_PEER, str(rank), str(tmp_path / "store")) for rank in range(2)]
    for process in processes:
        end_of(process)
