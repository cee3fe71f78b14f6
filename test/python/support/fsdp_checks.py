"""A program on FSDP2 run with and without funcol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsdp_programs as programs
import torch
from device_reports import forget_reports_of_older_fsdp2
from fsdp_programs import recorded
from programs import settled
from ranks import device_type, run_ranks
from torch import Tensor

import funcol


def check(program: Callable[..., list[Tensor]], world: int, *args: Any) -> None:
    """``program`` gives the same with funcol, and asks the same of streams and groups in the same order."""
    run_ranks(does_the_same, world, program, args)


def does_the_same(rank: int, world: int, program: Callable[..., list[Tensor]], args: tuple[Any, ...]) -> None:
    def run() -> tuple[list[Tensor], list[Any], programs.Log]:
        torch.manual_seed(0)
        with recorded() as log:
            results = program(rank, world, *args)
        return settled(results), [getattr(result, "placements", None) for result in results], log

    expected = run()
    with funcol.installed():
        found = run()
        torch.manual_seed(0)
        unwatched = settled(program(rank, world, *args))
    assert found[2] == expected[2]
    assert found[1] == expected[1]
    assert_same(found[0], expected[0])
    assert_same(unwatched, expected[0])
    assert_same(run()[0], expected[0])
    if device_type() == "cuda":
        forget_reports_of_older_fsdp2()


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert found
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
