"""NCCL groups that end while results are pending, by a time-out, an abort, or because they are destroyed.

The reader gets an error, each time, and never what is in the memory. One pair of processes goes through all
cases, a group each, since a process that has lost its peer is good for nothing else.

PyTorch's old process group, "nccl-legacy" or before PyTorch 2.15 "nccl", reports only what its own time-outs
aborted. Other results that are pending when a group is aborted are read there without an error, PyTorch's own
as funcol's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import start_process
from torch import Tensor

import funcol

pytestmark = pytest.mark.cuda

WORLD = 2
LIMIT_S = 240.0
NCCL_IS_OLD = torch.__version__ < "2.15"

# A group that blocks the host as it waits raises after its time-out. Others take the process down.
BLOCKING = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}

NO_ERROR = "no error"


def gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return funcol.all_reduce(gradient, "sum", group)

    x = x.clone().requires_grad_()
    Reduced.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad


STARTS: dict[str, Callable[[Tensor, dist.ProcessGroup], Tensor]] = {
    "all_reduce": lambda x, group: funcol.all_reduce(x, "sum", group),
    "merged gather": lambda x, group: funcol.all_gather_tensor(x, 1, group),
    "gradient": gradient,
}

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda result: result.sum().item(),
    "cpu": Tensor.cpu,
    "view": lambda result: result.view(-1)[1:] + 1,
    "wait_tensor": funcol.wait_tensor,
}


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    yield
    os.environ.clear()
    os.environ.update(before)


def warm_group(backend: str, variables: dict[str, str]) -> dist.ProcessGroup:
    """Returns a group whose ranks have met, so that only the collective of a case is without its peer."""
    with environment(variables):
        group = dist.new_group(backend=backend, timeout=timedelta(seconds=3))
        assert funcol.all_reduce(torch.ones(2, device="cuda"), "sum", group).tolist() == [2.0, 2.0]
    return group


def error_of(read: Callable[[Tensor], object], result: Tensor) -> str:
    try:
        read(result)
    except dist.DistBackendError as error:
        return str(error)
    return NO_ERROR


ENDS: dict[str, tuple[dict[str, str], Callable[[dist.ProcessGroup], None]]] = {
    "a time-out": (BLOCKING, lambda group: None),
    "an abort": ({}, dist.distributed_c10d._abort_process_group),
    "an abort of the backend": ({}, lambda group: group.abort()),
    "destroying it": (BLOCKING, dist.destroy_process_group),
}


def errors_after_each_end(rank: int, backend: str) -> dict[str, Any]:
    """By the end, the start and the read; on rank 0, whose peer calls nothing."""
    groups = {(end, start): warm_group(backend, ENDS[end][0]) for end in ENDS for start in STARTS}
    found: dict[str, Any] = {end: {} for end in ENDS}
    if rank == 0:
        for (end, start), group in groups.items():
            result = STARTS[start](torch.ones(3, 4, device="cuda"), group)
            assert funcol.is_pending(result)
            ENDS[end][1](group)
            found[end][start] = {name: error_of(read, result) for name, read in READS.items()}
    return found


def run_rank(rank: int, store: str, backend: str) -> None:
    torch.cuda.set_device(rank)
    file_store = dist.FileStore(store, WORLD)
    dist.init_process_group(f"cpu:gloo,cuda:{backend}", store=file_store, rank=rank, world_size=WORLD)
    found = errors_after_each_end(rank, backend)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier(group=dist.new_group(backend="gloo"))
    os._exit(0)  # groups that have ended cannot be left in good order


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} devices")
    backend = request.config.getoption("--cuda-backend")
    store = str(tmp_path_factory.mktemp("groups") / "store")
    here = Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem}\n"
    calls = [f"{here.stem}.run_rank({rank}, {store!r}, {backend!r})" for rank in range(WORLD)]
    processes = [start_process(code + call) for call in calls]
    try:
        out, err = processes[0].communicate(timeout=LIMIT_S)
    finally:
        for process in processes:
            process.kill()
    assert processes[0].returncode == 0, err
    answer: dict[str, Any] = json.loads(out.splitlines()[-1])
    return answer


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("end", ENDS)
def test_each_read_of_a_result_of_a_group_that_has_ended_is_an_error(
    errors: dict[str, Any], end: str, start: str, request: pytest.FixtureRequest
) -> None:
    is_old = NCCL_IS_OLD or request.config.getoption("--cuda-backend") != "nccl"
    if end == "an abort of the backend" and is_old:
        pytest.skip("the old process group does not tell that a work was aborted")
    of_reads = errors[end][start]
    assert NO_ERROR not in of_reads.values(), of_reads
    assert len(set(of_reads.values())) == 1
