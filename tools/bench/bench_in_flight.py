"""Times what it costs that collectives in flight are known, their callers and their purposes, too.

One process, in whose group no other rank does anything: an all_reduce and the first use of its result, with
callers recorded and without, in turns. See docs/performance.md.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measure import CPU, CPU_CLOCK, lone_group
from runner import Call, Table, cells, each, mark, repeat, run, show, summary
from torch import Tensor

import funcol

MOST_US = 1.0


def within_modules(depth: int, call: Callable[[Tensor], Tensor]) -> torch.nn.Module:
    """Returns a module whose forward is ``call``, within ``depth`` others, each three frames of PyTorch's."""
    module: torch.nn.Module = torch.nn.Module()
    module.forward = call  # type: ignore[method-assign]
    for _ in range(depth):
        module = torch.nn.Sequential(module)
    return module


def bench(repeat: int) -> dict[str, Any]:
    x = torch.ones(4, 8)
    with lone_group(CPU, 2):
        reduce = functools.partial(funcol.all_reduce, reduceOp="sum", group=dist.group.WORLD)
        in_1, in_5 = within_modules(1, reduce), within_modules(5, reduce)
        cases: dict[str, Call] = {
            "all_reduce + use": lambda: reduce(x) + 1,
            "in a module": lambda: in_1(x) + 1,
            "in 5 modules": lambda: in_5(x) + 1,
        }
        times: dict[str, dict[bool, list[float]]] = {name: {False: [], True: []} for name in cases}
        for _ in each("rounds", range(repeat)):
            for name, call in cases.items():
                for is_recorded in (False, True):
                    funcol.collectives.record_callers(is_recorded)
                    times[name][is_recorded].append(CPU_CLOCK.time_calls(call, 2000))
        funcol.collectives.record_callers(False)
    return {
        name: {
            "off": summary(of_case[False]),
            "on": summary(of_case[True]),
            "more": statistics.median(b - a for a, b in zip(of_case[False], of_case[True], strict=True)),
        }
        for name, of_case in times.items()
    }


def print_calls(calls: dict[str, Any]) -> None:
    show(
        f"microseconds a call, median (best); wanted: at most {MOST_US:g} more",
        "{:<20}{:>16}{:>16}{:>10}{:>8}",
        ("", "callers off", "callers on", "more", ""),
        (
            (name, *cells(row, ("off", "on"), 2), f"{row['more']:.2f}", mark(row["more"] <= MOST_US))
            for name, row in calls.items()
        ),
    )


if __name__ == "__main__":
    run(__doc__, [Table("calls", lambda args: bench(args.repeat), print_calls)], repeat(21))
