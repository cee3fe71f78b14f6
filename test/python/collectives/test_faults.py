"""A rank of a gloo group is killed, stopped, or never calls: what the others see, keep, and can still do."""

from __future__ import annotations

import os
import re
import signal
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import comes_true
from ranks import RankError, forked_ranks
from torch import Tensor

import funcol

# The timeout of the groups that lose a rank. A survivor that gets no error within it fails by LIMIT_S.
TIMEOUT = timedelta(seconds=3)

LIMIT_S = 60.0

SHAPE = (6, 4)


class Reduced(torch.autograd.Function):
    """Reduces the gradient over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return funcol.all_reduce(gradient, "sum", ctx.group), None


class Started(NamedTuple):
    """A collective on a group of its own, with its input as an array that says when its memory is free."""

    group: dist.ProcessGroup
    data: weakref.ref[Any]
    result: Tensor


class Seen(NamedTuple):
    """The outcome of one collective on a surviving rank."""

    group: str
    was_pending: bool
    errors: list[str]
    releases_its_input: bool


Start = Callable[[Tensor, dist.ProcessGroup], Tensor]


# Every rank gets something from the last one, which is the one that fails.
STARTS: dict[str, Start] = {
    "all_reduce": lambda x, g: funcol.all_reduce(x, "sum", g),
    "all_gather_tensor": lambda x, g: funcol.all_gather_tensor(x, 1, g),
    "reduce_scatter_tensor": lambda x, g: funcol.reduce_scatter_tensor(x, "sum", 0, g),
    "all_to_all_single": lambda x, g: funcol.all_to_all_single(x, None, None, g),
    "broadcast": lambda x, g: funcol.broadcast(x, g.size() - 1, g),
    "all_reduce_coalesced": lambda x, g: funcol.all_reduce_coalesced([x, x], "sum", g)[1],
}

RESULT_SHAPES: dict[str, Callable[[int], list[int]]] = {
    "all_reduce": lambda world: [6, 4],
    "all_gather_tensor": lambda world: [6, 4 * world],
    "reduce_scatter_tensor": lambda world: [6 // world, 4],
    "all_to_all_single": lambda world: [6, 4],
    "broadcast": lambda world: [6, 4],
    "all_reduce_coalesced": lambda world: [6, 4],
}

USES: dict[str, Callable[[Tensor], object]] = {
    "operator": torch.sum,
    "repr": repr,
    "numpy": Tensor.numpy,
    "of_a_view": lambda t: t.view(-1)[1:] + 1,
    "collective": lambda t: funcol.broadcast(t, 0, dist.group.WORLD),
    "wait_tensor": funcol.wait_tensor,
}


def end_as(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()  # never calls


def start_on(start: Start, group: dist.ProcessGroup) -> Started:
    data = np.ones(SHAPE, dtype=np.float32)
    return Started(group, weakref.ref(data), start(torch.from_numpy(data), group))


def error_of(use: Callable[[], object]) -> str:
    try:
        use()
    except dist.DistBackendError as error:
        return str(error)
    return "nothing was raised"


def see(started: Started) -> Seen:
    was_pending = funcol.is_pending(started.result)
    errors = [error_of(lambda use=use: use(started.result)) for use in USES.values()]  # type: ignore[misc]
    return Seen(started.group.group_name, was_pending, errors, comes_true(lambda: started.data() is None))


def sums_and_gathers(group: dist.ProcessGroup) -> list[Any]:
    mine = torch.full((1, 1), float(group.rank() + 1))
    return [
        funcol.all_reduce(mine, "sum", group).item(),
        funcol.all_gather_tensor(mine, 1, group).tolist(),
    ]


def run_rank(rank: int, world: int, fault: str, directory: Path) -> dict[str, Any]:
    """Fails on the last rank while the others wait for it, each op on a group of its own."""
    store = dist.FileStore(str(directory / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    names = [*STARTS, "backward", "dropped"]
    groups = {name: dist.new_group(timeout=TIMEOUT) for name in names}
    for group in groups.values():
        funcol.all_reduce(torch.ones(1), "sum", group).item()
    if rank == world - 1:
        store.wait([f"started{survivor}" for survivor in range(world - 1)])
        end_as(fault)

    started = {name: start_on(start, groups[name]) for name, start in STARTS.items()}
    dropped = start_on(lambda x, g: funcol.all_gather_tensor(x, 0, g), groups["dropped"]).data
    was_kept = dropped() is not None
    leaf = torch.ones(SHAPE, requires_grad=True)
    backward = Reduced.apply(leaf * 2, groups["backward"]).sum().backward
    store.set(f"started{rank}", "")

    seen: dict[str, Any] = {name: see(one) for name, one in started.items()}
    seen["backward"] = (groups["backward"].group_name, error_of(backward), leaf.grad)
    funcol._C.num_orphans()
    seen["dropped"] = (was_kept, comes_true(lambda: funcol._C.num_orphans() == 0 and dropped() is None))
    seen["unwaited"] = funcol.unwaited_collectives()
    survivors = dist.new_group(list(range(world - 1)), use_local_synchronization=True)
    seen["new_group"] = sums_and_gathers(survivors)
    del group, groups, survivors, started
    dist.destroy_process_group()
    store = dist.FileStore(str(directory / "second_store"), world - 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world - 1)
    seen["second_world"] = sums_and_gathers(dist.group.WORLD)
    return seen


def serve(rank: int, world: int, fault: str, directory: Path, answers: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        answers.send((False, run_rank(rank, world, fault, directory)))
    except BaseException:
        answers.send((True, traceback.format_exc()))
    os._exit(0)


@cache
def survivors_of(fault: str, world: int) -> list[dict[str, Any]]:
    """Returns the outcomes of each rank but the last."""
    with forked_ranks(serve, world, fault) as (_, answers):
        return [received(ours) for ours in answers[:-1]]


def received(answer: Connection) -> dict[str, Any]:
    if not connection.wait([answer], LIMIT_S):
        raise TimeoutError(f"a survivor has not answered in {LIMIT_S} s")
    raised, value = answer.recv()
    if raised:
        raise RankError(value)
    return value  # type: ignore[no-any-return]


each_fault = pytest.mark.parametrize("fault", ["killed", "stopped", "absent"])

each_world = pytest.mark.parametrize("world", [2, 3])

each_op = pytest.mark.parametrize("op", STARTS)


@pytest.mark.sampled(12)
@each_fault
@each_world
@each_op
def test_each_use_on_each_survivor_raises_naming_op_group_and_shape(fault: str, world: int, op: str) -> None:
    shape = re.escape(str(RESULT_SHAPES[op](world)))
    for survivor in survivors_of(fault, world):
        seen = survivor[op]
        expected = rf"funcol::{op} failed on group '{seen.group}'; result of shape .*{shape} has no data"
        assert [bool(re.search(expected, error)) for error in seen.errors] == [True] * len(USES), seen.errors


@each_fault
@each_world
@each_op
def test_a_result_whose_peer_failed_is_pending_until_its_first_use(fault: str, world: int, op: str) -> None:
    # Holds even if gloo has noticed the death of the rank by then.
    assert all(survivor[op].was_pending for survivor in survivors_of(fault, world))


@pytest.mark.sampled(6)
@each_fault
@each_world
@each_op
def test_a_failed_collective_lets_go_of_its_input(fault: str, world: int, op: str) -> None:
    assert all(survivor[op].releases_its_input for survivor in survivors_of(fault, world))


@each_fault
@each_world
def test_backward_raises_and_leaves_no_gradient(fault: str, world: int) -> None:
    for survivor in survivors_of(fault, world):
        group, error, gradient = survivor["backward"]
        assert f"funcol::all_reduce failed on group '{group}'; result of shape [6, 4] has no data" in error
        assert gradient is None


@each_fault
@each_world
def test_a_result_dropped_before_its_peer_failed_is_freed_after(fault: str, world: int) -> None:
    assert all(survivor["dropped"] == (True, True) for survivor in survivors_of(fault, world))


@each_fault
@each_world
def test_only_the_dropped_one_counts_as_unwaited(fault: str, world: int) -> None:
    assert all(s["unwaited"] == {"all_gather_tensor": 1} for s in survivors_of(fault, world))


@each_fault
@each_world
@pytest.mark.parametrize("group", ["new_group", "second_world"])
def test_the_survivors_form_a_new_group_and_go_on(fault: str, world: int, group: str) -> None:
    numbers = [float(rank + 1) for rank in range(world - 1)]
    for survivor in survivors_of(fault, world):
        assert survivor[group] == [sum(numbers), [numbers]]
