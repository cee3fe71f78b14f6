"""A call without a group, on a group that was destroyed, or in a fork of the process that made it, raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from differential import PROGRAM_SHAPE, PROGRAMS, destroyed_group, world_group
from processes import end_of, start_process
from ranks import on_ranks

import funcol

BEFORE_INIT = """
import sys
import torch, torch.distributed as dist, funcol
try:
    eval(sys.argv[1])
except ValueError as error:
    print(error)
"""

CALLS_BEFORE_INIT = {
    "none": ("funcol.all_reduce(torch.ones(2), 'sum')", "all_reduce"),
    "name": ("funcol.all_gather_tensor(torch.ones(2), 0, 'tp')", "all_gather_tensor"),
    "ranks": ("funcol.broadcast(torch.ones(2), 0, [0, 1])", "broadcast"),
    "world": (
        "funcol.all_reduce_coalesced([torch.ones(2)], 'sum', dist.group.WORLD)",
        "all_reduce_coalesced",
    ),
    "in place": ("funcol.all_reduce_inplace(torch.ones(2))", "all_reduce_inplace"),
}


@pytest.mark.parametrize("case", CALLS_BEFORE_INIT)
def test_before_there_is_a_group_the_error_says_how_to_make_one(case: str) -> None:
    call, op = CALLS_BEFORE_INIT[case]
    out, _ = end_of(start_process(BEFORE_INIT, call))
    assert out.strip() == (
        f"funcol::{op}: there is no process group yet: call torch.distributed.init_process_group() first."
    )


@pytest.mark.parametrize("function", PROGRAMS)
@pytest.mark.parametrize("gradient", [False, True], ids=["", "gradient"])
@on_ranks(2)
def test_a_call_on_a_destroyed_group_raises_at_the_call(
    rank: int, world: int, function: str, gradient: bool
) -> None:
    group = destroyed_group()
    own = torch.ones(PROGRAM_SHAPE, requires_grad=gradient)
    with pytest.raises(ValueError, match=rf"funcol::{function}: process group '.*' was destroyed"):
        PROGRAMS[function](funcol, own, world, group)
    assert funcol.all_reduce(torch.tensor(1.0), "sum", world_group()).item() == world


@on_ranks(2)
def test_an_operator_on_a_destroyed_group_raises_at_the_call(rank: int, world: int) -> None:
    group = destroyed_group()
    with pytest.raises(ValueError, match=r"funcol::all_reduce: process group '.*' was destroyed"):
        torch.ops.funcol.all_reduce(torch.ones(2), "sum", group)


IN_WORKER = """
import os, sys, tempfile
import torch, torch.distributed as dist, funcol
from torch.utils.data import DataLoader, Dataset

class Items(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        exec(sys.argv[1])
        return torch.ones(2)

store = tempfile.mktemp()
dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
group = dist.group.WORLD
assert funcol.all_reduce(torch.ones(2), "sum", group).sum() == 2
loader = DataLoader(Items(), num_workers=1, multiprocessing_context="fork")
try:
    print("loaded", next(iter(loader)).tolist())
except ValueError as error:
    print(str(error).strip().splitlines()[-1])
print("parent", os.getpid())
dist.destroy_process_group()
"""

CALLS_IN_WORKER = {
    "the group": "funcol.all_reduce(torch.ones(2), 'sum', group).sum()",
    "its name": "funcol.all_reduce(torch.ones(2), 'sum', group.group_name).sum()",
    "none": "funcol.all_reduce(torch.ones(2), 'sum').sum()",
    "operator": "torch.ops.funcol.all_reduce(torch.ones(2), 'sum', group.group_name).sum()",
}


@pytest.mark.parametrize("case", CALLS_IN_WORKER)
def test_a_collective_in_a_worker_of_a_data_loader_raises(case: str) -> None:
    out, _ = end_of(start_process(IN_WORKER, CALLS_IN_WORKER[case]))
    error, parent = out.strip().splitlines()
    pid = parent.split()[1]
    assert f"funcol::all_reduce: process group '0' was made in process {pid}, and this is process" in error
    assert "a fork of it, such as a worker of a DataLoader" in error


OWN_GROUP = """
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.FileStore(store + "child", 1), rank=0, world_size=1)
assert funcol.all_reduce(torch.ones(2), "sum").sum() == 2
"""


def test_a_group_that_a_worker_makes_is_its_own() -> None:
    out, _ = end_of(start_process(IN_WORKER, OWN_GROUP))
    assert out.startswith("loaded [[1.0, 1.0]]")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda x: funcol.all_reduce(x, "sum"),
    "all_gather_tensor": lambda x: funcol.all_gather_tensor(x, 0),
    "reduce_scatter_tensor": lambda x: funcol.reduce_scatter_tensor(x, "sum", 0),
    "all_to_all_single": lambda x: funcol.all_to_all_single(x, None, None),
    "broadcast": lambda x: funcol.broadcast(x, 0),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@on_ranks(2)
def test_a_call_without_a_group_means_the_world(rank: int, world: int, function: str) -> None:
    own = torch.arange(4.0) + rank
    expected = getattr(funcol, function)
    arguments: dict[str, tuple[Any, ...]] = {
        "all_reduce": ("sum",),
        "all_gather_tensor": (0,),
        "reduce_scatter_tensor": ("sum", 0),
        "all_to_all_single": (None, None),
        "broadcast": (0,),
    }
    assert torch.equal(FUNCTIONS[function](own), expected(own, *arguments[function], world_group()))
