"""Imports of the benchmarks, and the statistics that they compute from measured times."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest
import runner
from measure import Case, Overhead, call_record
from runner import mark

PROGRAMS = sorted(path.stem for path in Path(runner.__file__).parent.glob("bench_*.py"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_benchmark_finds_what_it_imports(name: str) -> None:
    assert importlib.import_module(name).__doc__


def test_an_overhead_is_the_median_of_the_rounds() -> None:
    overhead = Overhead.of(plain=[10, 10, 20], stock=[20, 30, 30], funcol=[11, 14, 23])
    assert overhead == Overhead(0.2, is_noise=False)
    assert mark(overhead.is_within(0.2)) == "met"
    assert mark(overhead.is_within(0.19)) == "MISSED"


@pytest.mark.parametrize("funcol", [[11.0, 9.0], [31.0, 9.0]])
def test_a_round_in_which_funcol_takes_less_than_the_work_alone_is_noise(funcol: list[float]) -> None:
    overhead = Overhead.of([10, 10], [20, 20], funcol)
    assert math.isnan(overhead.ratio)
    assert mark(overhead.is_within(1.0)) == "noise"


def test_a_round_in_which_stock_takes_no_more_than_the_work_alone_is_noise() -> None:
    assert Overhead.of([10, 10], [20, 10], [11, 11]).is_noise


def test_limits_of_overheads_are_not_judged_by_noise() -> None:
    case = Case("one", None, list, list, limits={"stock overhead": 0.5, "raw": 1.0})
    rounds = {"use": [10.0, 10.0], "stock": [20.0, 20.0], "raw": [20.0, 20.0], "funcol": [11.0, 9.0]}
    met = {target["against"]: target["met"] for target in call_record(case, rounds)["targets"]}
    assert met == {"stock overhead": None, "raw": True}
