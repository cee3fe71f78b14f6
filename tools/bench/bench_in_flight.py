"""Times what it costs that collectives in flight are known, their callers and their purposes, too.

One process, in whose group no other rank does anything: an all_reduce and the first use of its result, with
callers recorded and without, in turns. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from measure import (
    CPU_CLOCK,
    add_outcomes,
    cell,
    conclude,
    describe,
    device_named,
    each,
    lone_group,
    mark,
    say,
    summary,
)
from torch import Tensor

import funcol

MOST_US = 1.0


def within_modules(depth: int, call: Callable[[Tensor], Tensor]) -> torch.nn.Module:
    """A module whose forward is ``call``, within ``depth`` others: three frames of PyTorch's for each."""
    module: torch.nn.Module = torch.nn.Module()
    module.forward = call  # type: ignore[method-assign]
    for _ in range(depth):
        module = torch.nn.Sequential(module)
    return module


def bench(repeat: int) -> dict[str, Any]:
    x = torch.ones(4, 8)
    with lone_group(torch.device("cpu"), 2):
        reduce = functools.partial(funcol.all_reduce, reduceOp="sum", group=dist.group.WORLD)
        in_1, in_5 = within_modules(1, reduce), within_modules(5, reduce)
        cases: dict[str, Callable[[], Any]] = {
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=21, metavar="N", help="rounds (default %(default)s)")
    add_outcomes(parser)
    args = parser.parse_args()
    result = {**describe(device_named("cpu")), "calls": bench(args.repeat)}
    line = "{:<20}{:>16}{:>16}{:>10}{:>8}"
    say(f"\nmicroseconds a call, median (best) of {args.repeat}; wanted: at most {MOST_US:g} more\n")
    say(line.format("", "callers off", "callers on", "more", ""))
    for name, row in result["calls"].items():
        more = f"{row['more']:.2f}"
        say(line.format(name, cell(row["off"], 2), cell(row["on"], 2), more, mark(row["more"] <= MOST_US)))
    conclude(result, args)


if __name__ == "__main__":
    main()
