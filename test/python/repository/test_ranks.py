"""The harness that all tests on real ranks stand on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, rejoin, run_ranks

pytest_plugins = ["pytester"]


def doubles_its_rank(rank: int, world: int, factor: int) -> tuple[int, int]:
    return rank * factor, world


def reports_its_process(rank: int, world: int) -> int:
    return os.getpid()


def sums_over_ranks(rank: int, world: int) -> float:
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    return x.item()


def fails_on_rank(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        raise KeyError(f"thrown by {rank}")
    dist.barrier()


def hangs_on_rank(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        signal.pause()
    dist.barrier()


def dies_on_rank(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def leaves_a_collective_on_rank(rank: int, world: int, culprit: int) -> None:
    if rank == culprit:
        dist.all_reduce(torch.zeros(7), async_op=True)


def returns_something_unpicklable(rank: int, world: int) -> Any:
    return lambda: None


def rejoins_and_sums(rank: int, world: int) -> float:
    rejoin()
    return sums_over_ranks(rank, world)


def num_threads(rank: int, world: int) -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_back_in_rank_order(world: int) -> None:
    assert run_ranks(doubles_its_rank, world, 2) == [(2 * rank, world) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_can_talk_to_each_other(world: int) -> None:
    assert run_ranks(sums_over_ranks, world) == [sum(range(world))] * world


def test_ranks_are_processes_of_their_own() -> None:
    assert len({os.getpid(), *run_ranks(reports_its_process, 3)}) == 4


def test_ranks_live_on_after_a_case_that_passed() -> None:
    assert run_ranks(reports_its_process, 2) == run_ranks(reports_its_process, 2)


def test_ranks_use_one_thread_each() -> None:
    assert run_ranks(num_threads, 2) == [1, 1]


@pytest.mark.parametrize("culprit", [0, 1])
def test_the_traceback_of_a_failing_rank_is_shown(culprit: int) -> None:
    with pytest.raises(RankError) as failure:
        run_ranks(fails_on_rank, 2, culprit)
    text = str(failure.value)
    assert text.startswith(f"rank {culprit} of 2 raised")
    assert "in fails_on_rank" in text
    assert f"KeyError: 'thrown by {culprit}'" in text


def test_a_failing_rank_ends_the_others_at_once() -> None:
    pids = run_ranks(reports_its_process, 2)
    start = time.monotonic()
    with pytest.raises(RankError):
        run_ranks(fails_on_rank, 2, 0)
    assert time.monotonic() - start < 30
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_hanging_rank_times_out_and_is_killed(culprit: int) -> None:
    pids = run_ranks(reports_its_process, 2)
    with pytest.raises(TimeoutError, match="in hangs_on_rank"):
        run_ranks(hangs_on_rank, 2, culprit, timeout=1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_timeout_shows_where_each_unfinished_rank_was() -> None:
    run_ranks(sums_over_ranks, 2)  # starting ranks may take longer than the timeout to come
    with pytest.raises(TimeoutError, match=r"(?s)rank 0: .*in barrier.*rank 1: .*in hangs_on_rank"):
        run_ranks(hangs_on_rank, 2, 1, timeout=1)


def test_a_rank_that_crashes_is_reported_with_its_stack() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 died with exit code -11.*in dies_on_rank"):
        run_ranks(dies_on_rank, 2, 1)


def test_a_case_that_leaves_a_collective_open_fails_itself() -> None:
    with pytest.raises((RankError, TimeoutError)):
        run_ranks(leaves_a_collective_on_rank, 2, 1, timeout=2)


@pytest.mark.parametrize("failing", [fails_on_rank, dies_on_rank, leaves_a_collective_on_rank])
def test_the_case_after_a_failing_one_gets_new_ranks(failing: Any) -> None:
    with pytest.raises((RankError, TimeoutError)):
        run_ranks(failing, 2, 0, timeout=2)
    assert run_ranks(sums_over_ranks, 2) == [1.0, 1.0]


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_ranks(returns_something_unpicklable, 1)


def test_a_function_that_ranks_cannot_find_is_refused() -> None:
    with pytest.raises(ValueError, match="define it at the top of a module"):
        run_ranks(lambda rank, world: None, 1)


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_can_make_their_default_group_anew(world: int) -> None:
    assert run_ranks(rejoins_and_sums, world) == [sum(range(world))] * world


CUDA_TEST = """
import pytest

@pytest.mark.cuda
def test_on_a_gpu():
    pass
"""


@pytest.mark.parametrize(("required", "outcome"), [(False, "skipped"), (True, "errors")])
def test_without_a_gpu_cuda_tests_are_skipped_unless_required(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, required: bool, outcome: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if required:
        monkeypatch.setenv("FUNCOL_REQUIRE_CUDA", "1")
    else:
        monkeypatch.delenv("FUNCOL_REQUIRE_CUDA", raising=False)
    pytester.makeconftest((Path(__file__).parents[1] / "conftest.py").read_text())
    pytester.makeini("[pytest]\nmarkers = cuda: needs a GPU")
    pytester.makepyfile(CUDA_TEST)
    pytester.runpytest_inprocess().assert_outcomes(**{outcome: 1})
