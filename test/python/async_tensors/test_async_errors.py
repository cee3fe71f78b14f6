"""Every use of a pending tensor whose collective failed raises."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import end_of, start_process
from ranks import on_ranks
from slow_collectives import Finish, make_pending, same, values
from tensor_reads import READS, VIEWS
from torch import Tensor

import funcol


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


@on_ranks(2)
def test_a_peer_that_never_calls_is_an_error_after_the_timeout_of_the_group(rank: int, world: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        result = funcol.all_reduce(torch.ones(2, 3), "sum", group)
        before = time.monotonic()
        for use in (torch.sum, repr, Tensor.numpy):
            with pytest.raises(
                dist.DistBackendError, match=r"funcol::all_reduce .* shape \[2, 3\]"
            ) as raised:
                use(result.t())
            assert "funcol.check_agreement()" in str(raised.value)
            assert "funcol.collectives.record_callers()" in str(raised.value)
        assert time.monotonic() - before < 20
    dist.barrier()


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
        assert "funcol::all_gather_tensor failed on group '0'; result of shape [2, 6]" in str(error)
    else:
        raise AssertionError("unfinished data was given out")
assert time.monotonic() - before < 30
os._exit(0)  # there is no peer to say goodbye to
"""


def test_a_peer_that_dies_is_an_error_within_the_timeout_of_the_group(tmp_path: Path) -> None:
    processes = [start_process(LOSE_THE_PEER, str(rank), str(tmp_path / "store")) for rank in range(2)]
    for process in processes:
        end_of(process)
