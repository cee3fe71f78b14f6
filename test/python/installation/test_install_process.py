"""funcol.install() and the process: forks, warnings, Python dispatchers, waits with the GIL."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from differential import sample, world_group
from ranks import on_ranks

import funcol

pytestmark = pytest.mark.usefixtures("_not_installed")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )


FORK = """
import os, threading
import torch, torch.distributed._functional_collectives as stock
import funcol
threads = threading.active_count(), len(os.listdir("/proc/self/task"))
funcol.install()
assert (threading.active_count(), len(os.listdir("/proc/self/task"))) == threads, "a thread was started"
child = os.fork()
if child == 0:
    assert stock.wait_tensor(torch.ones(2)).tolist() == [1.0, 1.0]
    funcol.uninstall()
    funcol.install()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_installing_starts_no_thread_and_the_process_may_fork() -> None:
    done = run_python(FORK)
    assert (done.stdout, done.stderr) == ("7\n", "")


def test_installing_warns_of_nothing() -> None:
    code = "import torch, funcol; funcol.install(); funcol.uninstall(); funcol.install()"
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Dispatch from Python


# No call waits: from the Python dispatcher some releases call PyTorch's kernels with the GIL held, and a wait
# for gloo may then last forever.
DISPATCH_FROM_PYTHON = """
import torch, funcol
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch._dispatch.python import enable_python_dispatcher

dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
group = dist.group.WORLD.group_name

def reduced():
    x = torch.ones(2)
    with enable_python_dispatcher():
        core, legacy = torch.ops._c10d_functional, torch.ops.c10d_functional
        one = core.wait_tensor(core.all_reduce(x, "sum", group))
        other = legacy.wait_tensor(legacy.all_reduce(x, "sum", "", [0, 1], 2))
        assert one.tolist() == other.tolist() == [1.0, 1.0]
        try:
            core.all_reduce(x, "median", group)
        except Exception as error:
            return "funcol" in str(error)

print(reduced())
with funcol.installed():
    print(reduced())
print(reduced())
"""


def test_the_python_dispatcher_follows_what_is_installed() -> None:
    done = run_python(DISPATCH_FROM_PYTHON)
    assert (done.stdout, done.returncode) == ("False\nTrue\nFalse\n", 0), done.stderr


# Rank 1 starts once a thread of rank 0 told it to, while rank 0 waits.
def waits_where_it_was_called_with_the_gil(rank: int, world: int) -> None:
    store = dist.PrefixStore("waits_with_the_gil", dist.distributed_c10d._get_default_store())
    go = threading.Timer(0.2, lambda: store.set("go", "go"))
    if rank == 0:
        go.start()
    else:
        store.wait(["go"])
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    started = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", world_group().group_name)
    waited = torch.ops._c10d_functional.wait_tensor.default.redispatch(below, started)
    assert waited.tolist() == [float(world)] * 2
    if rank == 0:
        go.join()
        store.delete_key("go")


@on_ranks(2)
def test_a_wait_called_with_the_gil_lets_other_threads_run(rank: int, world: int) -> None:
    with funcol.installed():
        waits_where_it_was_called_with_the_gil(rank, world)


@on_ranks(2)
def test_results_of_either_side_outlive_the_change(rank: int, world: int) -> Any:
    x = sample(rank, (3,))
    group = world_group()
    started_before = stock.all_reduce(x, "sum", group)
    with funcol.installed():
        started_inside = stock.all_reduce(x, "sum", group)
        operator_inside = torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)
        torch.testing.assert_close(started_before + 0, funcol.all_reduce(x, "sum", group) + 0, rtol=0, atol=0)
    assert type(started_before) is stock.AsyncCollectiveTensor
    assert funcol.is_pending(started_inside)
    torch.testing.assert_close(started_inside + 0, started_before + 0, rtol=0, atol=0)
    torch.testing.assert_close(stock.wait_tensor(operator_inside), started_before + 0, rtol=0, atol=0)


# Operators on DTensors

SERVED = """
import os, torch, funcol
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from funcol.installation import operator_counts

dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])

def used(with_gradient=True):
    y = x.detach().requires_grad_(with_gradient)
    z = (y.softmax(-1) @ y.t()).sum()
    if with_gradient:
        z.backward()
        assert y.grad.placements == x.placements
    return operator_counts().get("aten._softmax.default", {})
"""

IN_A_CHILD = """
funcol.install()
used(); used()
child = os.fork()
if child == 0:
    # PyTorch's backward passes do not run after a fork
    assert used(with_gradient=False) == {"served": 3}
    funcol.uninstall()
    assert used(with_gradient=False) == {"served": 3}
    funcol.install()
    assert used(with_gradient=False) == {"served": 4}
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), used())
"""

AT_EXIT = """
import atexit, weakref
funcol.install()
used()
kept = x * 2  # ends after the interpreter's modules
weakref.finalize(kept, used)

class Used:
    def __del__(self):
        x.sum()

cycle = [Used()]
cycle.append(cycle)

atexit.register(lambda: print("ends", set(used())))
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        (IN_A_CHILD, "7 {'served': 3}\n"),
        (AT_EXIT, "ends {'served'}\n"),
    ],
    ids=["in a child", "at exit"],
)
def test_operators_are_served_in_programs_that_fork_and_end(program: str, printed: str) -> None:
    done = run_python(SERVED + program)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
