"""``torchrun ... -m funcol run train.py``: a program as it is, with funcol installed, and what funcol did."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from .. import _C, installation
from ..redistribution.plan_tables import bytes_text

MOST_LEFT = 5
"""Operators and reasons that the last line names."""


def add_to(commands: Any) -> None:
    """Adds the command to argparse's ``commands``."""
    command = commands.add_parser(
        "run",
        help="run a program with funcol installed, and print what funcol did",
        description="Calls funcol.install() and runs PROGRAM as python does: a file, a folder or an archive "
        "with a __main__.py, or a module with -m. Rank 0 prints one line at the end, on standard error: "
        "operators on DTensors that C++ handled, those that were left to PyTorch and why, redistributions, "
        "and the bytes that their busiest ranks sent.",
        epilog="example: torchrun --nproc-per-node 4 -m funcol run train.py --steps 100",
    )
    command.add_argument("-m", dest="is_module", action="store_true", help="PROGRAM is a module")
    command.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="PROGRAM [ARGUMENT ...]",
        help="all that follows is the program's",
    )
    command.set_defaults(run=_program_of)


def _program_of(arguments: argparse.Namespace) -> Callable[[], None]:
    """Returns the function that runs the program, whose errors are its own."""
    if not arguments.program:
        raise ValueError("there is no program. Name a file, or a module: python -m funcol run train.py")
    program, *_ = arguments.program
    if not arguments.is_module and not os.path.exists(program):
        raise ValueError(f"there is no file {program}. Name the program first, and then its arguments.")

    def run() -> None:
        installation.install()
        sys.argv = arguments.program
        try:
            if arguments.is_module:
                sys.path.insert(0, os.getcwd())
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                if os.path.isfile(program):
                    sys.path.insert(0, os.path.dirname(os.path.abspath(program)))
                runpy.run_path(program, run_name="__main__")
        finally:
            if os.environ.get("RANK", "0") == "0":
                print(summary(), file=sys.stderr, flush=True)

    return run


def summary() -> str:
    """Returns one line: what funcol has done in this process since it was installed."""
    handled, left = 0, Counter[tuple[str, str]]()
    for op, counts in installation.operator_counts().items():
        for reason, count in counts.items():
            if reason == "served":
                handled += count
            else:
                left[op, reason] += count
    number, bytes_ = _C.redistribution_counts()
    return (
        f"funcol: {handled} operators on DTensors in C++, {_left_text(left)}; {number} redistributions, "
        f"which sent {bytes_text(bytes_)}"
    )


def _left_text(left: Counter[tuple[str, str]]) -> str:
    if not left:
        return "none left to PyTorch"
    named = ", ".join(f"{count} {op}: {reason}" for (op, reason), count in left.most_common(MOST_LEFT))
    more = f", and {len(left) - MOST_LEFT} kinds more" if len(left) > MOST_LEFT else ""
    return f"{left.total()} left to PyTorch ({named}{more})"
