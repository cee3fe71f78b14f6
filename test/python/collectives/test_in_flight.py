"""Collectives in flight: the list, who started them, and dumps at a signal."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from differential import world_group
from in_flight import in_flight, peer_that_comes_late, recording
from processes import comes_true, start_process
from ranks import on_ranks
from slow_collectives import Finish, make_pending

import funcol

# The list


def test_a_pending_collective_is_listed_until_it_is_waited_for() -> None:
    tensors = make_pending([torch.zeros(2, 3), torch.zeros(4)], Finish(), "listed", "some group")
    [listed] = in_flight("listed")
    assert (listed.op, listed.group) == ("listed", "some group")
    assert (listed.shapes, listed.dtype) == ([(2, 3), (4,)], torch.float32)
    assert 0 <= listed.seconds < 60
    assert (listed.caller, listed.purpose) == (None, None)
    tensors[1].sum()
    assert in_flight("listed") == []


def test_seconds_go_on() -> None:
    tensors = make_pending([torch.zeros(1)], Finish(), "aging")
    [listed] = in_flight("aging")
    before = listed.seconds
    assert comes_true(lambda: listed.seconds > before)
    tensors[0].sum()


def test_the_oldest_comes_first() -> None:
    first = make_pending([torch.zeros(1)], Finish(), "of two")
    number = in_flight("of two")[0]
    assert comes_true(lambda: number.seconds > 0.01)
    second = make_pending([torch.zeros(2)], Finish(), "of two")
    assert [one.shapes for one in in_flight("of two")] == [[(1,)], [(2,)]]
    del first, second


def test_a_line_tells_all_of_it() -> None:
    tensors = make_pending([torch.zeros(2, 3), torch.zeros(4)], Finish(), "told", "some group")
    [listed] = in_flight("told")
    expected = r"told of Float \[2, 3\], \[4\] on group 'some group' for \d+\.\d s"
    assert re.fullmatch(expected, str(listed))
    assert re.fullmatch(f"<{expected}>", repr(listed))
    tensors[0].sum()


@on_ranks(2)
def test_held_dropped_and_registered_collectives_are_listed_until_the_peer_comes(
    rank: int, world: int
) -> None:
    x = torch.full((2, 3), float(rank))
    with peer_that_comes_late(rank) as is_alone:
        if is_alone:
            held = funcol.all_reduce(x, "sum", world_group())
            assert funcol.is_pending(funcol.all_gather_tensor(x, 1, world_group()))  # and dropped
            left_to_pytorch = []
            with funcol.installed(dtensor=False):
                left_to_pytorch.append(torch.ops._c10d_functional.broadcast(x, 0, world_group().group_name))
            found = {one.op: one for one in funcol.pending()}
            assert set(found) == {"all_reduce", "all_gather_tensor", "broadcast"}
            assert {one.group for one in found.values()} == {world_group().group_name}
            assert found["all_gather_tensor"].shapes == [(2, 3 * world)]
            assert found["broadcast"].shapes == [(2, 3)]
            assert "(rank 0 of 2)" in str(found["all_reduce"])
    if rank != 0:
        held = funcol.all_reduce(x, "sum", world_group())
        funcol.all_gather_tensor(x, 1, world_group()).sum()
        left_to_pytorch = [funcol.broadcast(x, 0, world_group())]
    assert held.tolist() == [[1.0] * 3] * 2
    assert funcol.wait_tensor(left_to_pytorch[0]).tolist() == [[0.0] * 3] * 2
    assert comes_true(lambda: funcol.pending() == [])


@on_ranks(2)
def test_what_is_over_is_not_listed_though_nobody_has_waited_for_it(rank: int, world: int) -> None:
    results = [funcol.all_reduce(torch.ones(3), "sum", world_group()) for _ in range(3)]
    dist.barrier()
    assert comes_true(lambda: in_flight("all_reduce") == [])
    assert all(map(funcol.is_pending, results))
    assert funcol.unwaited_collectives()["all_reduce"] >= 3
    for result in results:
        result.sum()


def test_threads_may_list_while_others_start_and_wait() -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def start_and_wait() -> None:
        try:
            while not stop.is_set():
                tensors = make_pending([torch.zeros(2)], Finish(), "of threads")
                make_pending([torch.zeros(3)], Finish(), "of threads")  # and dropped
                tensors[0].sum()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start_and_wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        assert {one.op for one in in_flight("of threads")} <= {"of threads"}
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []


FORK = """
import os, torch, funcol
held = funcol._C.make_pending([torch.ones(1)], lambda: None, "parents", is_completed=False)
funcol._C.make_pending([torch.ones(1)], lambda: None, "dropped", is_completed=False)
assert sorted(one.op for one in funcol.pending()) == ["dropped", "parents"]
child = os.fork()
if child == 0:
    own = funcol._C.make_pending([torch.ones(1)], lambda: None, "childs", is_completed=False)
    os._exit(0 if [one.op for one in funcol.pending()] == ["childs"] else 1)
assert os.waitpid(child, 0)[1] == 0
held[0].sum()
"""


def test_a_forked_process_lists_its_own() -> None:
    process = start_process(FORK)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err


# Callers


def line_here() -> int:
    return sys._getframe(1).f_lineno


@on_ranks(2)
def test_the_line_outside_of_pytorch_and_funcol_is_noted_while_callers_are_recorded(
    rank: int, world: int
) -> None:
    results = []
    with peer_that_comes_late(rank) as is_alone:
        if is_alone:
            with recording():
                line = line_here() + 1
                results.append(funcol.all_reduce(torch.ones(2), "sum", world_group()))
                [listed] = funcol.pending()
                name = "test_the_line_outside_of_pytorch_and_funcol_is_noted_while_callers_are_recorded"
                assert listed.caller == f"{__file__}:{line} in {name}"
                assert f", started at {listed.caller}" in str(listed)
            results.append(funcol.all_reduce(torch.ones(2), "sum", world_group()))
            assert [one.caller is None for one in funcol.pending()] == [False, True]
    if rank != 0:
        results = [funcol.all_reduce(torch.ones(2), "sum", world_group()) for _ in range(2)]
    assert [result.tolist() for result in results] == [[2.0, 2.0]] * 2


@on_ranks(2)
def test_a_collective_of_a_backward_pass_has_the_line_that_called_it(rank: int, world: int) -> None:
    x = torch.ones(2, requires_grad=True)
    loss = funcol.all_reduce(x, "sum", world_group()).sum()
    with peer_that_comes_late(rank) as is_alone:
        if is_alone:
            with recording():
                line = line_here() + 1
                loss.backward()
                assert [one.caller for one in funcol.pending()] == [
                    f"{__file__}:{line} in test_a_collective_of_a_backward_pass_has_the_line_that_called_it"
                ]
    if rank != 0:
        loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


# Errors


@on_ranks(2)
def test_the_error_of_a_time_out_tells_what_else_is_in_flight(rank: int, world: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    with peer_that_comes_late(rank) as is_alone:
        message = ""
        if is_alone:
            with recording():
                first = funcol.all_reduce(torch.ones(2, 3), "sum", group)
                second = funcol.all_gather_tensor(torch.ones(4), 0, world_group())
                with pytest.raises(dist.DistBackendError) as raised:
                    first.sum()
            message = str(raised.value)
    if rank == 0:
        assert f"funcol::all_reduce failed on group '{group.group_name}'; result of shape [2, 3]" in message
        assert re.search(
            r"It was started [1-9]\.\d s ago \(rank 0 of 2\) at .*test_in_flight\.py:\d+ in test_the_error",
            message,
        )
        assert "Also in flight in this process:\n  all_gather_tensor of Float [8] on group" in message
    else:
        second = funcol.all_gather_tensor(torch.ones(4), 0, world_group())
    assert second.tolist() == [1.0] * 8


def test_an_error_lists_a_few_of_many() -> None:
    def fail() -> None:
        raise ValueError("the peer is gone")

    others = [make_pending([torch.zeros(1)], Finish(), "one of many") for _ in range(20)]
    (failing,) = make_pending([torch.zeros(1)], fail, "failing")
    with pytest.raises(dist.DistBackendError, match=r"\n  and \d+ more") as raised:
        failing.sum()
    assert str(raised.value).count("\n  one of many of") <= 8
    assert "\n  failing of" not in str(raised.value)
    del others


# Signals

DUMP = """
import os, signal, sys, time, torch, funcol
file = open(sys.argv[1], "w")
before = []
signal.signal(signal.SIGUSR1, lambda *_: before.append("called"))
funcol.collectives.dump_pending_on(signal.SIGUSR1, file)
held = funcol._C.make_pending([torch.ones(2, 3)], lambda: None, "all_reduce", "dp", is_completed=False)
def read():
    return open(sys.argv[1]).read()
def wait_for(text, count):
    deadline = time.monotonic() + 30
    while read().count(text) < count:
        assert time.monotonic() < deadline, read()
        time.sleep(0.01)
os.kill(os.getpid(), signal.SIGUSR1)
wait_for(" s\\n", 1)
assert before == ["called"]
"""

LATER = """
os.kill(os.getpid(), signal.SIGUSR1)
wait_for(" s\\n", 2)
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_for(f"in process {os.getpid()}", 1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert funcol.collectives.cancel_dump_pending_on(signal.SIGUSR1)
assert not funcol.collectives.cancel_dump_pending_on(signal.SIGUSR1)
num_before = len(read())
os.kill(os.getpid(), signal.SIGUSR1)
assert len(before) == 3
time.sleep(0.2)
assert len(read()) == num_before
held[0].sum()
"""


def test_a_signal_dumps_and_calls_the_handler_before_until_it_is_cancelled(tmp_path: Path) -> None:
    process = start_process(DUMP + LATER, str(tmp_path / "dump"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    first = (tmp_path / "dump").read_text().splitlines()[:2]
    assert re.fullmatch(r"funcol: 1 collectives in flight in process \d+, the oldest first:", first[0])
    assert re.fullmatch(r"  all_reduce of Float \[2, 3\] on group 'dp' for \d+\.\d s", first[1])


HANGS = """
import sys, signal, torch, torch.distributed as dist, funcol
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
assert funcol.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item() == 2
funcol.collectives.dump_pending_on(signal.SIGUSR1)
if sys.argv[2] == "0":
    print("ready", flush=True)
    funcol.all_reduce(torch.ones(7), "sum", dist.group.WORLD).sum()
else:
    signal.pause()
"""


def test_a_rank_that_hangs_dumps_though_its_main_thread_is_blocked(tmp_path: Path) -> None:
    ranks = [start_process(HANGS, str(tmp_path / "store"), str(rank)) for rank in range(2)]
    try:
        hanging = ranks[0]
        assert hanging.stdout is not None
        assert hanging.stderr is not None
        assert hanging.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 30
        line = ""
        while "all_reduce of Float [7] on group '0' (rank 0 of 2) for" not in line:
            assert time.monotonic() < deadline
            if "in flight" in line or not line:
                os.kill(hanging.pid, signal.SIGUSR1)
            line = hanging.stderr.readline()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("signum", "error", "message"),
    [
        (0, ValueError, "the signal is 0. Expected one from 1"),
        (1000, ValueError, "the signal is 1000. Expected one from 1"),
        (signal.SIGKILL, RuntimeError, "takes no handler: Invalid argument. Pass another"),
    ],
)
def test_what_is_no_signal_is_refused(signum: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        funcol.collectives.dump_pending_on(signum, sys.__stderr__)
    assert not funcol.collectives.cancel_dump_pending_on(signum)


def test_a_dump_writes_to_any_file(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = make_pending([torch.zeros(2)], Finish(), "dumped")
    funcol.collectives.dump_pending()
    funcol.collectives.dump_pending(sys.stdout)
    out, err = capsys.readouterr()
    for text in (out, err):
        assert "collectives in flight in process" in text
        assert "\n  dumped of Float [2] on group 'dp' for " in text
    tensors[0].sum()
