"""Ranks of which the last fails in the middle of a program, and what the others make of it."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fault_programs import PROGRAMS, Step
from ranks import RankError, forked_ranks

import funcol

TIMEOUT_S = 3.0  # of the groups that lose a rank
GRACE_S = 5.0  # what an error may take beyond it
LIMIT_S = 120.0  # start and warm-up included

# Without, a rank fails at the start of its step.
HAS_HOOKS = hasattr(dist.ProcessGroup, "register_pre_hook")

# Older releases have it as a private one.
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


class BrokenError(Exception):
    """An error that a rank raises by itself."""


class Outcome(NamedTuple):
    """The error that ended a survivor's step, and its duration."""

    error: str  # its type
    text: str
    result: object
    seconds: float
    groups: list[str]


class Ended(NamedTuple):
    outcomes: list[Outcome]  # of the survivors
    exit_codes: list[int | None]  # of all ranks; None: has not ended
    last_words: str  # the failing rank's traceback, if it has one


def raise_broken() -> None:
    raise BrokenError("this rank's program is broken")


def run_out_of_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        torch.ones(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    raise AssertionError("4 GiB did not exceed the limit")


FAULTS: dict[str, Callable[[], object]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(0),
    "exception": raise_broken,
    "out_of_memory": run_out_of_memory,
}

# How the failing rank ends: with which exit code (None: it has not ended), and with what in its traceback.
ENDS: dict[str, tuple[int | None, str]] = {
    "SIGKILL": (-signal.SIGKILL, ""),
    "SIGSTOP": (None, ""),
    "exit": (0, ""),
    "exception": (1, "BrokenError: this rank's program is broken"),
    "out_of_memory": (1, "can't allocate memory"),
}


class Rank:
    """A rank, in its own process."""

    def __init__(self, rank: int, world: int, directory: Path) -> None:
        self.rank, self.world = rank, world
        self.store = dist.FileStore(str(directory / "store"), world)
        self.groups: list[dist.ProcessGroup] = []
        dist.init_process_group("gloo", store=self.store, rank=rank, world_size=world)

    def new_group(self, ranks: list[int] | None = None) -> dist.ProcessGroup:
        group = dist.new_group(ranks)
        if ranks is None or self.rank in ranks:
            self.groups.append(group)
        return group

    def meet(self, place: str) -> None:
        """Waits for all ranks without any group of the program."""
        self.store.set(f"{place} {self.rank}", "")
        self.store.wait([f"{place} {rank}" for rank in range(self.world)], timedelta(seconds=LIMIT_S))

    def warmed_up(self, program: str) -> Step:
        """Runs the program's step once, with time to compile, and returns it with short time-outs set."""
        step = PROGRAMS[program].make(self.rank, self.world, self.new_group)
        step()
        self.meet("warmed up")
        for group in self.groups:
            set_timeout(timedelta(seconds=TIMEOUT_S), group)
        return step

    def fail_after(self, num_collectives: int, fault: Callable[[], object]) -> None:
        """This rank fails at the start of a later collective, which C++ may call."""
        num_left = num_collectives

        def count(_: Any) -> None:
            nonlocal num_left
            if num_left == 0:
                fault()
            num_left -= 1

        for group in self.groups:
            group.register_pre_hook(17, count)

    def outcome_of(self, step: Step) -> Outcome:
        begin = time.monotonic()
        error, text, result = None, "", None
        try:
            result = step()
        except BaseException as raised:
            error, text = raised, str(raised)
        seconds = time.monotonic() - begin
        groups = [group.group_name for group in self.groups]
        return Outcome(type(error).__name__, text, result, seconds, groups)


def run_rank(rank: int, world: int, program: str, fault: str, directory: Path, answers: Connection) -> None:
    """Ends as a script does: by an exception, or after it has destroyed its groups."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    status = 1
    try:
        with funcol.installed():
            this = Rank(rank, world, directory)
            step = this.warmed_up(program)
            is_last = rank == world - 1
            if is_last and HAS_HOOKS:
                this.fail_after(PROGRAMS[program].num_before, FAULTS[fault])
            this.meet("begins")
            if is_last and not HAS_HOOKS:
                FAULTS[fault]()
            if is_last:
                step()
                raise AssertionError(f"{program} starts no collective after {PROGRAMS[program].num_before}")
            answers.send(this.outcome_of(step))
            dist.destroy_process_group()
        status = 0
    except BaseException:
        with suppress(OSError):
            answers.send(traceback.format_exc())
    atexit._run_exitfuncs()
    os._exit(status)


def run_with_fault(program: str, fault: str, world: int) -> Ended:
    with forked_ranks(run_rank, world, program, fault) as (processes, answers):
        deadline = time.monotonic() + LIMIT_S
        outcomes = [received(ours, deadline) for ours in answers[:-1]]
        has_ended = processes if ENDS[fault][0] is not None else processes[:-1]
        for process in has_ended:
            process.join(TIMEOUT_S + GRACE_S)
        return Ended(outcomes, [process.exitcode for process in processes], last_words(answers[-1]))


def last_words(answer: Connection) -> str:
    with suppress(EOFError):
        if answer.poll():
            return str(answer.recv())
    return ""


def received(answer: Connection, deadline: float) -> Outcome:
    if not connection.wait([answer], deadline - time.monotonic()):
        raise TimeoutError(f"a survivor has not answered in {LIMIT_S} s")
    value = answer.recv()
    if isinstance(value, str):
        raise RankError(value)
    return value  # type: ignore[no-any-return]
