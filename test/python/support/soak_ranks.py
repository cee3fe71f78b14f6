"""A rank of a soak: runs actions at random for some minutes, and samples what must not grow."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from flatness import trend_of
from processes import allocated_bytes, comes_true, resident_bytes
from soak_actions import WORLD, Action, Actions

import funcol

NUM_SAMPLES = 60
WARM_UP = 0.3  # the share of the time in which tables fill up, and compilers run

Samples = dict[str, list[float]]

# PyTorch's flight recorder keeps the name and the ranks of each group that ever was: 450 bytes, which take
# this much of resident memory. test_soak.py shows that funcol keeps nothing beside.
GROUP_BYTES = 650

# Of each table but that of specs, by which local maps know their arguments: so low that varying lengths fill
# it in the first minutes. Then its entries settle, of which one new call in 16 replaces some.
TABLE_BYTES = 1 << 16


def sample() -> dict[str, float]:
    """Once all collectives are over and garbage is gone."""
    assert comes_true(lambda: funcol._C.num_orphans() == 0), funcol.pending()
    gc.collect()
    status = Path("/proc/self/status").read_text()
    [threads] = [line.split()[1] for line in status.splitlines() if line.startswith("Threads:")]
    num_groups = dist.distributed_c10d._world.group_count  # that ever were
    return {
        "resident bytes": resident_bytes() - GROUP_BYTES * num_groups,
        "threads": int(threads),
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        # PyTorch keeps a list of each group.
        "objects of Python": len(gc.get_objects()) - num_groups,
        "in flight": len(funcol.pending()),
        **{f"table of {name}": size for name, size in funcol._C.table_sizes().items()},
    }


def bytes_that_groups_leave(rank: int, with_funcol: bool, num_groups: int) -> float:
    """Returns the bytes that stay allocated for each group that was made, used and destroyed."""

    def makes_groups(num: int) -> int:
        for _ in range(num):
            group = dist.new_group()
            tensor = torch.ones(3)
            if with_funcol:
                funcol.all_reduce(tensor, "sum", group).tolist()
            else:
                dist.all_reduce(tensor, group=group)
            dist.barrier()
            dist.destroy_process_group(group)
        gc.collect()
        return allocated_bytes()

    with funcol.installed() if with_funcol else contextlib.nullcontext():
        before = makes_groups(num_groups // 2)
        return (makes_groups(num_groups) - before) / num_groups


def goes_on(until: float) -> bool:
    """Returns true if rank 0 has time left."""
    flag = torch.tensor([float(time.monotonic() < until)])
    return bool(funcol.broadcast(flag, 0, dist.group.WORLD).item())


class Leaks:
    """Leaks an object of each kind at each call: a soak has to find it."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self) -> None:
        self.kept += [torch.ones(250_000), os.open("/dev/null", os.O_RDONLY)]


def soak(rank: int, seconds: float, seed: int, leaks: bool) -> dict[str, Any]:
    """On rank 0: how often each action ran, and the samples of each rank."""
    chosen = random.Random(seed)
    counts: Counter[str] = Counter()
    samples: Samples = {}
    with funcol.installed():
        funcol.table_limits({name: TABLE_BYTES for name in funcol.table_limits() if name != "specs"})
        actions = Actions(rank, chosen).all()
        if leaks:
            actions["leaks"] = Leaks()
        for name, action in actions.items():
            run(name, action)
        begin = time.monotonic()
        for number in range(NUM_SAMPLES):
            until = begin + seconds * (WARM_UP + (1 - WARM_UP) * (number + 1) / NUM_SAMPLES)
            late = False
            while not late:  # some actions before each sample, however slow they are
                for _ in range(10):
                    name = chosen.choice(list(actions))
                    run(name, actions[name])
                    counts[name] += 1
                late = not goes_on(until)
            for what, value in sample().items():
                samples.setdefault(what, []).append(value)
    gathered: list[Any] = [None] * WORLD
    dist.all_gather_object(gathered, samples)
    return {"counts": counts, "samples": gathered}


def run(name: str, action: Action) -> None:
    try:
        action()
    except Exception as error:
        error.add_note(f"in the action {name}")
        raise


# The growth that may be: of memory, a share of its level; of anything counted, two.
MEMORY_FLOOR = 0.01
COUNT_FLOOR = 2.0


def report(samples: list[Samples]) -> tuple[list[str], list[str]]:
    """Returns a line for each kind of sample, of the rank on which it grows most, and the lines that grow."""
    lines, growing = [], []
    for what in samples[0]:
        trends = [trend_of(of_rank[what]) for of_rank in samples]
        rank, worst = max(enumerate(trends), key=lambda one: one[1].growth)
        floor = MEMORY_FLOOR * worst.level if what == "resident bytes" else COUNT_FLOOR
        line = f"{what}: {worst.level:.0f}, growth {worst.growth:+.1f}, noise {worst.noise:.1f} (rank {rank})"
        lines.append(line)
        growing += [] if all(trend.is_flat(floor) for trend in trends) else [line]
    return lines, growing
