"""funcol comes to and goes from FSDP2: between steps, before and after imports."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import fsdp_programs as programs
import pytest
import torch
import torch.distributed as dist
from fsdp_checks import assert_same
from fsdp_programs import batch, blocks, sharded, state
from programs import settled
from ranks import on_ranks
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from versions import TORCH

import funcol
from funcol import installation
from funcol.installation import fully_shard as under
from funcol.installation import fully_shard_table as table

ON_DEVICES = True


@on_ranks(2)
def test_a_model_may_see_funcol_come_and_go(rank: int, world: int) -> None:
    def run(come_and_go: bool) -> list[Tensor]:
        model = sharded(blocks())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        found = []
        for step in range(6):
            if come_and_go:
                funcol.uninstall() if step % 2 else funcol.install()
            loss = model(batch(rank, step)).square().mean()
            if come_and_go and step in (3, 4):  # between forward and backward pass, too
                funcol.uninstall() if installation.is_installed() else funcol.install()
            loss.backward()
            found += programs.copies(state(model))
            optimizer.step()
            optimizer.zero_grad()
        return settled(found)

    expected = run(come_and_go=False)
    try:
        assert_same(run(come_and_go=True), expected)
    finally:
        funcol.uninstall()


def codes() -> dict[str, Any]:
    names = [*table.REPLACED, *table.HOOKS, *table.WITHOUT_GRADIENTS]
    functions = {name: under.find_decorated(name) for name in names}
    inner = {f"{name}, undecorated": inspect.unwrap(functions[name]) for name in names if functions[name]}
    return {
        name: (function, function.__code__, function.__kwdefaults__)
        for name, function in {**functions, **inner}.items()
        if function is not None
    }


def test_uninstall_leaves_every_function_as_it_was() -> None:
    before = codes()
    with funcol.installed():
        assert codes() != before
    assert codes() == before
    assert _fsdp_param_group.record_function is torch.profiler.record_function


def test_functions_stay_the_same_objects_with_their_signatures() -> None:
    before = {name: (id(found), inspect.signature(found)) for name, (found, *_) in codes().items()}
    with funcol.installed():
        during = {name: (id(found), inspect.signature(found)) for name, (found, *_) in codes().items()}
    assert during == before


IMPORTS_LATE = """
import sys, funcol
funcol.install()
assert "torch.distributed.fsdp" not in sys.modules
import torch.distributed.fsdp
from torch.distributed.fsdp._fully_shard._fsdp_param_group import record_function
import torch.profiler
assert record_function is not torch.profiler.record_function
funcol.uninstall()
from torch.distributed.fsdp._fully_shard._fsdp_param_group import record_function
assert record_function is torch.profiler.record_function
"""

IMPORTS_TOO_LATE = """
import funcol
with funcol.installed(): pass
from torch.distributed.fsdp._fully_shard._fsdp_param_group import record_function
import torch.profiler
assert record_function is torch.profiler.record_function
with funcol.installed():
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import record_function
    assert record_function is not torch.profiler.record_function
"""


@pytest.mark.parametrize("program", [IMPORTS_LATE, IMPORTS_TOO_LATE], ids=["during", "after"])
def test_fsdp2_imported_after_install_is_taken_over(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)


def test_this_minor_has_the_functions_that_are_taken_over() -> None:
    taken, left = under.replaced_and_unsupported()
    assert "FSDPParamGroup._to_unsharded" in taken
    if TORCH >= (2, 15):
        assert not left


def test_what_is_taken_over_is_the_same_while_it_is() -> None:
    before = under.replaced_and_unsupported()
    with funcol.installed():
        assert under.replaced_and_unsupported() == before


def test_a_function_of_another_kind_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fsdp_param.FSDPParam, "to_unsharded", lambda self: None)
    assert "FSDPParamGroup._to_unsharded" in under.replaced_and_unsupported()[1]


@pytest.mark.skipif(
    not getattr(dist, "_is_spmd_types_available", bool)(), reason="no package here checks types"
)
@pytest.mark.parametrize("checks", [True, False])
@on_ranks(2)
def test_under_a_checker_of_types(rank: int, world: int, checks: bool) -> None:
    expected = settled(programs.trains_with_types(rank, world, checks))
    with funcol.installed():
        assert not under.replaced_and_unsupported()[1]
        assert_same(settled(programs.trains_with_types(rank, world, checks)), expected)


def test_an_install_that_fails_undoes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    before = codes()

    def fails(parts: Any) -> None:
        raise ValueError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(under, "_register_with_cpp", fails)
        with pytest.raises(ValueError, match="on purpose"):
            funcol.install()
        with pytest.raises(ValueError, match="on purpose"), funcol.installed():
            pass
    assert not installation.is_installed()
    assert not installation.is_under_dtensor()
    assert codes() == before
    with funcol.installed():
        assert codes() != before
    assert codes() == before
