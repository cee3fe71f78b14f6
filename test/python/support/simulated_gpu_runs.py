"""Runs programs of ``simulated_gpu_programs`` on the simulated GPU.

    results = run_checks("basics", "--seed", "3")
    results["values"]    # "" if the check passed, else what went wrong

A program is a module with ``CHECKS``, functions by name. All checks of a program run in one process, since
each start costs seconds; the result is kept for the session.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TOOL = SUPPORT.parents[2] / "tools" / "simulated_gpu"

STATUS_AFTER_REPORTS = 66


def names_of_checks(program: str) -> list[str]:
    return list(importlib.import_module(f"simulated_gpu_programs.{program}").CHECKS)


@functools.cache
def run_checks(program: str, *options: str) -> dict[str, str]:
    """Runs the program; returns the failure of each check by its name, "" for those that passed."""
    done = run_python("-m", "simulated_gpu_programs.run", program, options=options)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise AssertionError(
            f"program {program!r} ended with status {done.returncode}:\n{done.stdout}\n{done.stderr}"
        )
    return dict(json.loads(lines[-1]))


def run_python(
    *arguments: str, options: tuple[str, ...] = (), timeout_s: float = 600, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs this Python with the arguments on the simulated GPU; environment variables by their names."""
    process = start_python(*arguments, options=options, **variables)
    try:
        out, errors = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def start_python(*arguments: str, options: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
    """Starts what :func:`run_python` runs."""
    environment = {**os.environ, **variables, "PYTHON": sys.executable, "PYTHONPATH": str(SUPPORT)}
    return subprocess.Popen(
        [str(TOOL), *options, sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
