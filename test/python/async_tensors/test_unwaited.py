"""Collectives that nothing waits for serve their peers, take no memory, and are told of at exit."""

from __future__ import annotations

import gc
import re
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from differential import PROGRAM_SHAPE, PROGRAMS, world_group
from processes import end_of, resident_bytes, start_process
from ranks import device_type, on_ranks, run_ranks
from slow_collectives import Finish, make_pending

import funcol

each_world = pytest.mark.parametrize("world", [1, 2])

DROPPED = {
    "all_reduce": lambda x: funcol.all_reduce(x, "sum", world_group()),
    "reduce_scatter_tensor": lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, world_group()),
}


def taken_bytes() -> int:
    """Returns the memory that this rank has taken; on the CPU, freed memory counts."""
    return resident_bytes() if device_type() == "cpu" else torch.cuda.memory_allocated()


def is_legacy_nccl() -> bool:
    """PyTorch's older NCCL process group keeps part of the unwaited work, without funcol, too."""
    return torch.__version__ < "2.15" or "legacy" in str(dist.get_backend_config())


def falls_below(num_bytes: float) -> None:
    """Waits until the ranks have no more than that. NCCL releases tensors late, in its next collective."""
    deadline = time.monotonic() + 30
    has_more = torch.ones(())
    while has_more.item():
        assert time.monotonic() < deadline
        has_more = torch.tensor(float(taken_bytes() > num_bytes))
        dist.all_reduce(has_more, dist.ReduceOp.MAX)


def drops_many(rank: int, world: int, op: str, num_bytes: int) -> None:
    count = 10_000 if device_type() == "cpu" else 1_000
    call = DROPPED[op]
    x = torch.ones(num_bytes // 4)
    num_unwaited = funcol.unwaited_collectives().get(op, 0)
    num_orphans = funcol._C.num_orphans()
    num_registered = torch._C._distributed_c10d._get_work_registry_size()
    before = taken_bytes()
    for i in range(count):
        call(x)
        if i % 100 == 0:  # so that no rank runs far ahead, which takes memory as well
            dist.barrier()
    dist.barrier()
    if device_type() == "cpu":
        assert taken_bytes() - before < count * num_bytes / 8
    elif not is_legacy_nccl():
        falls_below(before + count * num_bytes / 8)
    deadline = time.monotonic() + 30
    while funcol._C.num_orphans() > num_orphans:  # another thread waits for them
        assert time.monotonic() < deadline
    assert torch._C._distributed_c10d._get_work_registry_size() <= num_registered
    assert funcol.unwaited_collectives()[op] == num_unwaited + count


@pytest.mark.sampled(2)
@pytest.mark.on_devices_too
@each_world
@pytest.mark.parametrize("op", DROPPED)
def test_results_that_are_dropped_take_no_memory(world: int, op: str) -> None:
    run_ranks(drops_many, world, op, 1 << 16)


NEVER_WAIT = """
import sys, warnings
import torch, torch.distributed as dist, funcol
warnings.simplefilter("default")
rank, world, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], world), rank=rank, world_size=world)
group = dist.group.WORLD
assert funcol.all_reduce(torch.ones(2), "sum", group).tolist() == [world] * 2
for _ in range(NUM_DROPPED):
    funcol.all_reduce(torch.ones(3), "sum", group)
held = [funcol.all_gather_tensor(torch.ones(2, 2), 1, group).view(-1) for _ in range(NUM_HELD)]
exec(end)
"""


def ends_of(
    world: int, directory: Path, num_dropped: int, num_held: int, end: str = ""
) -> list[tuple[int, str, str]]:
    """Returns exit codes, outputs and errors of ranks that wait for nothing and ``end``."""
    counts = f"NUM_DROPPED, NUM_HELD = {num_dropped}, {num_held}"
    processes = [
        start_process(counts + NEVER_WAIT, str(rank), str(world), str(directory / "store"), end)
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.long
def test_a_process_with_10000_unwaited_collectives_ends_with_one_warning(tmp_path: Path) -> None:
    for code, out, err in ends_of(2, tmp_path, 9_000, 1_000):
        assert (code, out) == (0, "")
        assert err.count("Warning") == 1, err
        assert "results of 10000 collectives: 1000 all_gather_tensor, 9000 all_reduce. " in err


ENDS = {
    "destroyed": (
        "dist.destroy_process_group()",
        0,
        "results of 3 collectives: 1 all_gather_tensor, 2 all_reduce",
    ),
    "sys_exit": ("sys.exit(3)", 3, "3 collectives: 1 all_gather"),
    "exception": ("raise KeyError", 1, "3 collectives: 1 all_gather"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ENDS)
def test_the_warning_comes_however_the_process_ends(name: str, tmp_path: Path) -> None:
    end, expected_code, expected = ENDS[name]
    ((code, _, err),) = ends_of(1, tmp_path, 2, 1, end)
    assert code == expected_code, err
    assert err.count("Warning") == 1, err
    assert expected in err


def test_a_process_that_waited_for_all_ends_silently(tmp_path: Path) -> None:
    assert ends_of(1, tmp_path, 0, 2, "[h.sum() for h in held]; dist.destroy_process_group()") == [
        (0, "", "")
    ]


FORK = """
import os, sys, warnings
import torch, funcol
warnings.simplefilter("default")
parents = funcol._C.make_pending([torch.ones(1)], lambda: None, "parents")
child = os.fork()
if child == 0:
    exec(sys.argv[1])
else:
    os.waitpid(child, 0)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("in_child", "warned_of"),
    [
        ("childs = funcol._C.make_pending([torch.ones(1)], print, 'childs')", ["childs", "parents"]),
        ("parents[0].sum()", ["parents"]),
    ],
    ids=["own", "uses_its_parents"],
)
def test_a_forked_process_warns_of_its_own(in_child: str, warned_of: list[str]) -> None:
    _, err = end_of(start_process(FORK, in_child))
    assert re.findall(r"Warning.* the result of 1 collective: 1 (\w+)\. Whether it ", err) == warned_of, err


@pytest.mark.parametrize("function", PROGRAMS)
@on_ranks(2)
def test_a_collective_is_counted_by_the_name_of_the_function_that_was_called(
    rank: int, world: int, function: str
) -> None:
    before = funcol.unwaited_collectives()
    x = torch.ones(PROGRAM_SHAPE)
    kept = PROGRAMS[function](funcol, x, world, world_group())
    counts = funcol.unwaited_collectives()
    new = {op for op, count in counts.items() if count != before.get(op, 0)}
    assert new <= {function}
    assert new or not any(map(funcol.is_pending, kept if isinstance(kept, list) else [kept]))


@pytest.mark.parametrize("drop", [False, True], ids=["held", "dropped"])
def test_what_nothing_waited_for_is_counted_by_op(drop: bool) -> None:
    op = f"counted_{drop}"
    results = [make_pending([torch.ones(2), torch.ones(3)], list, op) for _ in range(3)]
    views = [t.view(-1) for ts in results for t in ts]
    assert funcol.unwaited_collectives()[op] == 3
    if drop:
        del results, views
        assert funcol.unwaited_collectives()[op] == 3
    else:
        views[-1].sum()
        assert funcol.unwaited_collectives()[op] == 2


def test_a_result_of_pytorchs_registry_is_left_to_its_count() -> None:
    before = funcol.unwaited_collectives()
    wrapped = funcol.AsyncCollectiveTensor(torch.ones(2))
    assert funcol.is_pending(wrapped)
    num_orphans = funcol._C.num_orphans()
    del wrapped
    assert funcol._C.num_orphans() == num_orphans
    assert funcol.unwaited_collectives() == before


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
    tensors = make_pending([torch.zeros(3), torch.zeros(3)], finish, is_completed=True)
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


@on_ranks(2)
def test_a_collective_whose_result_is_dropped_still_serves_its_peers(rank: int, world: int) -> None:
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
