"""Runs the checks of a program in this process and prints as JSON what went wrong in each.

    tools/simulated_gpu python -m simulated_gpu_programs.run basics

A check fails if it raises, or if the simulated GPU reports something that the check does not take.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable

import torch

from simulated_gpu_programs.reports import take_reports


def result_of(check: Callable[[], None]) -> str:
    try:
        check()
        torch.cuda.synchronize()
    except Exception:
        take_reports()
        return traceback.format_exc()
    return take_reports()


def main(program: str, *names: str) -> None:
    checks = importlib.import_module(f"simulated_gpu_programs.{program}").CHECKS
    print(json.dumps({name: result_of(checks[name]) for name in names or checks}))


if __name__ == "__main__":
    main(*sys.argv[1:])
