"""Times the same work done several ways, in one process, in whose group no other rank does anything."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from runner import Call, each, median_ratio, summaries, turns, without_gc
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

SIDES = ("stock", "raw", "funcol")
CHUNK_US = 4000.0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Overhead:
    """The ratio of funcol's time above the plain work to stock's, over rounds in which all took turns.

    ``is_noise``: in one round a side took less than the plain work.
    """

    ratio: float
    is_noise: bool

    @staticmethod
    def of(plain: list[float], stock: list[float], funcol: list[float]) -> Overhead:
        above = [(b - a, c - a) for a, b, c in zip(plain, stock, funcol, strict=True)]
        if any(theirs <= 0 or ours < 0 for theirs, ours in above):
            return Overhead(math.nan, is_noise=True)
        return Overhead(statistics.median(ours / theirs for theirs, ours in above), is_noise=False)

    def is_within(self, limit: float) -> bool | None:
        """Returns None if the rounds do not tell."""
        return None if self.is_noise else self.ratio <= limit


@dataclass(frozen=True)
class Case:
    """One line: the same work done by funcol and by others.

    ``stock`` is ``None`` where stock has no such function. ``use`` is what all sides do besides the
    collective, on plain tensors. ``limits``: the largest ratios wanted, by their names in
    :func:`call_record`.
    """

    name: str
    stock: Call | None
    raw: Call
    funcol: Call
    use: Call | None = None
    limits: dict[str, float] = field(default_factory=dict)

    def calls(self) -> dict[str, Call]:
        """Returns the calls of all sides that exist."""
        sides = {"use": self.use, "stock": self.stock, "raw": self.raw, "funcol": self.funcol}
        return {side: call for side, call in sides.items() if call is not None}


def check_same(case: Case, compare_values: bool) -> None:
    """Raises unless all ways give the same shapes and dtypes, and values where data really moves."""

    def tensors(call: Call) -> list[Tensor]:
        result = call()
        return result if isinstance(result, list) else [result]

    expected = tensors(case.raw)
    for side, call in case.calls().items():
        if side == "use":
            continue
        for got, want in zip(tensors(call), expected, strict=True):
            same = got.shape == want.shape and got.dtype == want.dtype
            if not same or (compare_values and not torch.equal(got, want)):
                raise RuntimeError(f"{case.name}: {side} gives {got}, raw gives {want}")


@dataclass(frozen=True)
class Clock:
    """A clock in nanoseconds, and a wait for all work that was started so far."""

    now: Callable[[], int]
    synchronize: Callable[[], None]
    # The number of calls after which to wait, untimed, for the device; None times calls with their wait.
    num_calls_issued: int | None = None

    def time_calls(self, call: Call, num_calls: int) -> float:
        """Returns microseconds a call, over ``num_calls`` calls in a row."""
        if self.num_calls_issued is not None:
            return self._time_issue(call, num_calls, self.num_calls_issued)
        self.synchronize()
        begin = self.now()
        for _ in range(num_calls):
            call()
        self.synchronize()
        return (self.now() - begin) / num_calls / 1000

    def calls_in(self, call: Call, chunk_us: float, sample: int = 20) -> int:
        """Returns the number of calls that take about ``chunk_us``; at least one."""
        return max(1, int(chunk_us / self.time_calls(call, sample)))

    def _time_issue(self, call: Call, num_calls: int, num_calls_issued: int) -> float:
        elapsed = 0
        for done in range(0, num_calls, num_calls_issued):
            self.synchronize()
            begin = self.now()
            for _ in range(min(num_calls_issued, num_calls - done)):
                call()
            elapsed += self.now() - begin
        self.synchronize()
        return elapsed / num_calls / 1000


# A fake group never waits, so the thread's own time is the whole cost, and other processes do not count.
CPU_CLOCK = Clock(time.thread_time_ns, lambda: None)
CUDA_CLOCK = Clock(time.perf_counter_ns, torch.cuda.synchronize)
# A simulated device runs what is queued while the host waits, and its queue has 1024 places. Autograd has
# a thread a device, so thread time would miss the backward pass.
CALLS_CLOCK = Clock(time.perf_counter_ns, torch.cuda.synchronize, num_calls_issued=64)
STEPS_CLOCK = Clock(time.perf_counter_ns, torch.cuda.synchronize, num_calls_issued=1)


def is_simulated_alone() -> bool:
    """Returns true if the program runs under ``tools/simulated_gpu --alone``."""
    return os.environ.get("SIMULATED_GPU_ALONE", "0") != "0"


def measure(case: Case, repeat: int, clock: Clock) -> dict[str, Any]:
    """Returns one record: each side is timed once a round, and the order turns from round to round."""
    calls = case.calls()
    num_calls = {}
    for side, call in calls.items():
        clock.time_calls(call, 50)
        num_calls[side] = clock.calls_in(call, CHUNK_US)
    rounds: dict[str, list[float]] = {side: [] for side in calls}
    with without_gc():
        for side in turns(calls, range(repeat)):
            rounds[side].append(clock.time_calls(calls[side], num_calls[side]))
    return call_record(case, rounds)


def call_record(case: Case, rounds: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the times of ``rounds`` and their ratios, funcol's to those of each side.

    ``"stock overhead"`` is the ratio of funcol's to stock's time, both without the use.
    """

    def ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
        return {"median": median_ratio(ours, theirs), "best": min(ours) / min(theirs)}

    ratios = {side: ratio(rounds["funcol"], rounds[side]) for side in ("stock", "raw") if side in rounds}
    noise = set()
    if "stock" in rounds and "use" in rounds:
        without = {side: [a - b for a, b in zip(rounds[side], rounds["use"], strict=True)] for side in SIDES}
        ratios["stock overhead"] = ratio(without["funcol"], without["stock"])
        if Overhead.of(rounds["use"], rounds["stock"], rounds["funcol"]).is_noise:
            noise.add("stock overhead")
    targets = []
    for name, limit in case.limits.items():
        if name in ratios:
            of_row = ratios[name]["median"]
            met = None if name in noise else of_row <= limit
            targets.append({"against": name, "limit": limit, "ratio": of_row, "met": met})
    return {"name": case.name, "us": summaries(rounds), "ratio": ratios, "targets": targets}


@dataclass(frozen=True)
class Lone:
    """A default group that waits for no other process, and the clock for it."""

    backend: str
    num_ranks: int
    clock: Clock


@contextlib.contextmanager
def lone_group(device: torch.device, num_ranks: int, whole_steps: bool = False) -> Iterator[Lone]:
    """Makes an NCCL group under ``tools/simulated_gpu --alone`` and for one rank on a GPU, else a fake group,
    which sends nothing.

    ``whole_steps``: a call issues so much that the simulated device is waited for after each.
    """
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cuda" and is_simulated_alone():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=num_ranks)
        # Groups of some ranks are made anew: a split needs to know what the other ranks choose.
        dist.group.WORLD.bound_device_id = None
        lone = Lone("nccl", num_ranks, STEPS_CLOCK if whole_steps else CALLS_CLOCK)
    elif device.type == "cuda" and num_ranks == 1:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
        lone = Lone("nccl", 1, CUDA_CLOCK)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        lone = Lone("fake", num_ranks, CUDA_CLOCK if device.type == "cuda" else CPU_CLOCK)
    try:
        yield lone
    finally:
        dist.destroy_process_group()


def default_num_ranks(device: torch.device) -> int:
    """Returns the ranks of a benchmark of single collectives: NCCL has one on a GPU."""
    return 1 if device.type == "cuda" and not is_simulated_alone() else 2


@contextlib.contextmanager
def fake_ranks(num_ranks: int) -> Iterator[None]:
    """Makes a fake group, which sends nothing; the process keeps its threads."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bench_cases(
    title: str,
    cases: Callable[[int], Iterable[Case]],
    device: torch.device,
    num_ranks: int,
    repeat: int,
    compares: Callable[[Lone], bool] | None = None,
) -> dict[str, Any]:
    """Measures ``cases(num_ranks)`` in a lone group. With ``compares``, checks that all sides give the same,
    and the same values if that returns true."""
    records = []
    with lone_group(device, num_ranks) as lone:
        for case in each(title, cases(lone.num_ranks)):
            if compares is not None:
                check_same(case, compare_values=compares(lone))
            records.append(measure(case, repeat, lone.clock))
    return {"backend": lone.backend, "num_ranks": lone.num_ranks, "repeat": repeat, "cases": records}
