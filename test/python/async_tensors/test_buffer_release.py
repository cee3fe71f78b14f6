"""Completed collectives release their buffers, used or not, and waits release the GIL."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from differential import world_group
from processes import comes_true, resident_bytes
from ranks import on_ranks
from torch import Tensor

import funcol

MIB = 2**20
M_MMAP_THRESHOLD = -3


def memory_is_given_back() -> None:
    """From now on, what is freed in pieces of 64 KiB and more no longer counts as resident."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**16) == 1


def peak_bytes() -> int:
    """Returns the peak of resident memory since :func:`forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


COUNT = 16
NUM_BYTES = 4 * MIB
MOST_PASSES = 10


def backward_memory(gather: Callable[[Tensor], Tensor]) -> tuple[int, bool, list[Tensor]]:
    """Returns the peak memory of a backward pass over COUNT gathered weights, and if only gradients remain.

    Also returns the weights, whose gradients are unused.
    """
    weights = [torch.ones(NUM_BYTES // 4096, 1024).requires_grad_() for _ in range(COUNT)]
    loss = torch.stack([(gather(weight) * 0.5).sum() for weight in weights]).sum()
    dist.barrier()
    gc.collect()
    before = resident_bytes()
    forget_peak()
    peak_before = peak_bytes()
    loss.backward()
    peak = peak_bytes() - peak_before
    alone = comes_true(lambda: resident_bytes() - before < (COUNT + 0.5) * NUM_BYTES)
    return peak, alone, weights


@pytest.mark.parametrize("dim", [0, 1])
@on_ranks(2)
def test_gradients_that_nobody_has_used_hold_no_more_than_their_own_memory(
    rank: int, world: int, dim: int
) -> None:
    memory_is_given_back()
    stock_peak, _, _ = backward_memory(lambda w: stock.all_gather_tensor_autograd(w, dim, world_group()))
    # More are under way on a busy machine, whose threads of gloo get no turn.
    for _ in range(MOST_PASSES):
        peak, alone, weights = backward_memory(
            lambda w: funcol.all_gather_tensor_autograd(w, dim, world_group())
        )
        assert alone
        more = torch.tensor(peak - stock_peak)
        dist.all_reduce(more, dist.ReduceOp.MAX)
        # One collective, with its gradient and gloo's copy of it, runs while the next gradient is computed.
        if more < 4 * NUM_BYTES:
            break
    assert more < 4 * NUM_BYTES
    assert all(weight.grad is not None and funcol.is_pending(weight.grad) for weight in weights[1:])


@on_ranks(2)
def test_sends_that_were_dropped_let_go_of_what_they_sent(rank: int, world: int) -> None:
    memory_is_given_back()
    count, num_bytes = 20, 2 * MIB
    before = resident_bytes()
    if rank == 0:
        for _ in range(count):
            torch.ops.funcol.isend(torch.ones(num_bytes // 4), 1, 0, world_group().group_name)
    else:
        received = torch.empty(num_bytes // 4)
        for _ in range(count):
            dist.recv(received, 0)
    dist.barrier()
    assert comes_true(lambda: funcol._C.num_orphans() == 0)
    assert comes_true(lambda: resident_bytes() - before < count * num_bytes / 4)


@on_ranks(2)
def test_comm_tensors_that_were_dropped_let_go_of_what_was_reduced(rank: int, world: int) -> None:
    memory_is_given_back()
    count, num_bytes = 20, 2 * MIB
    before = resident_bytes()
    for _ in range(count):
        out = funcol.collectives.CommTensor(torch.empty(num_bytes // 8))
        dist.reduce_scatter_tensor(out, torch.ones(num_bytes // 4), async_op=True)
    del out
    dist.barrier()
    assert comes_true(lambda: funcol._C.num_orphans() == 0)
    assert comes_true(lambda: resident_bytes() - before < count * num_bytes / 4)


FIRST_USES: dict[str, Callable[[Tensor], object]] = {
    "numpy": Tensor.numpy,
    "data_ptr": Tensor.data_ptr,
    "tolist": Tensor.tolist,
    "is_set_to": lambda t: t.is_set_to(t),
    "untyped_storage": Tensor.untyped_storage,
}


@pytest.mark.parametrize("use", FIRST_USES)
@on_ranks(2, timeout=20)
def test_a_first_use_of_what_core_started_waits_without_the_gil(rank: int, world: int, use: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    key = f"may come {use}"
    if rank == 0:
        started = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", world_group().group_name)
        result = funcol.AsyncCollectiveTensor(started)
        # The peer comes once another thread of this process has run while this one waits.
        thread = threading.Timer(0.05, lambda: store.set(key, "yes"))
        thread.start()
        FIRST_USES[use](result)
        assert result.tolist() == [world, world]
        thread.join()
    else:
        store.wait([key])
        total = torch.ones(2)
        dist.all_reduce(total)


@on_ranks(2)
def test_a_tensor_that_a_thread_waits_for_at_a_fork_is_an_error_in_the_child(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    key = "has forked"
    if rank > 0:
        store.wait([key])
        dist.all_reduce(torch.ones(3))
        return
    result = funcol.all_reduce(torch.ones(3), "sum", world_group())
    thread = threading.Thread(target=result.sum)
    thread.start()
    time.sleep(0.1)  # it waits by now, or else the child finds no waiting thread
    child = os.fork()
    if child == 0:
        try:
            result.sum()
        except dist.DistBackendError as error:
            os._exit(0 if "when this process was forked" in str(error) else 1)
        os._exit(2)
    assert comes_true(lambda: os.waitpid(child, os.WNOHANG) == (child, 0)), "the child hangs, or got data"
    store.set(key, "yes")
    thread.join()
    assert result.tolist() == [world] * 3
