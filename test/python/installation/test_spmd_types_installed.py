"""Functions of the package spmd_types that funcol.install() replaces, by version."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import world_group
from spmd_cases import COLLECTIVES, R, S, on_ranks, outcome, same, spmd
from torch import Tensor

import funcol
from funcol.commands.info import info
from funcol.installation import spmd_types as takeover


def test_info_tells_the_version_and_that_it_is_taken_over() -> None:
    version = importlib.metadata.version("spmd_types")
    assert takeover.known_version() == (version, True)
    assert info().endswith(f"{version}: replaces its collectives")


def test_functions_stay_the_same_objects_and_go_back() -> None:
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "convert", "invariant_to_replicate"]
    before = {name: getattr(spmd, name) for name in names}
    codes = {name: getattr(found, "__wrapped__", found).__code__ for name, found in before.items()}
    with funcol.installed():
        assert takeover.replaced_functions() == names
        for name, found in before.items():
            assert getattr(spmd, name) is found
            assert getattr(found, "__wrapped__", found).__code__ is not codes[name]
    assert takeover.replaced_functions() == []
    for name, found in before.items():
        assert getattr(found, "__wrapped__", found).__code__ is codes[name]


def test_an_unknown_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(takeover._KNOWN, "spmd_types._local", set())
    with funcol.installed():
        assert takeover.replaced_functions() == []


@on_ranks(2)
def test_an_unknown_version_computes_the_same(rank: int, world: int) -> None:
    theirs = [outcome(rank, world, case, world_group()) for case in COLLECTIVES]
    known = takeover._KNOWN["spmd_types._local"]
    takeover._KNOWN["spmd_types._local"] = set()
    try:
        with funcol.installed():
            ours = [outcome(rank, world, case, world_group()) for case in COLLECTIVES]
    finally:
        takeover._KNOWN["spmd_types._local"] = known
    for case, one, other in zip(COLLECTIVES, ours, theirs, strict=True):
        same(one[1], other[1], case)
        same(one[2], other[2], case)


@on_ranks(2)
def test_what_a_program_sets_as_dist_is_called(rank: int, world: int) -> None:
    class Counted:
        count = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_to_all(self, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return dist.all_to_all(*args, **kwargs)

    module = Counted()
    spmd.set_dist(module)
    try:
        with funcol.installed():
            spmd.all_to_all(torch.ones(4, 4), world_group(), src=S(0), dst=S(1))
    finally:
        spmd.set_dist(None)
    assert module.count == 1


PROGRAM = """
import funcol
funcol.install()
import spmd_types
from funcol.installation import spmd_types as takeover
from funcol.commands.info import info
assert "all_reduce" in takeover.replaced_functions()
funcol.uninstall()
assert takeover.replaced_functions() == []
"""


def test_the_package_may_be_imported_after_install() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)


@on_ranks(2, timeout=180)
def test_a_compiled_program_computes_the_same(rank: int, world: int) -> None:
    torch._dynamo.reset()

    def program(x: Tensor) -> Tensor:
        return spmd.all_gather(x * 2, world_group(), src=S(0), dst=R).sin()

    x = torch.full((2, 2), float(rank))
    theirs = program(x)
    with funcol.installed():
        same(torch.compile(program, backend="aot_eager")(x), theirs)
