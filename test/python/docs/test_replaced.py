"""The page of replaced functions names what ``install()`` replaces, and nothing else."""

from __future__ import annotations

import re
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as stock
import torch.distributed.fsdp
import torch.distributed.tensor.experimental
from guides import DOCS, on_the_newest_pytorch

import funcol

pytestmark = on_the_newest_pytorch

# The function behind a static method.
BEHIND = {"from_local": "DTensor.from_local"}


def functions() -> Iterator[tuple[str, Any, object]]:
    """Yields names in the modules of torch.distributed and in their classes, with their values and code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are deprecated
        for module in [
            one for name, one in list(sys.modules.items()) if name.startswith("torch.distributed")
        ]:
            for name, value in list(vars(module).items()) if isinstance(module, types.ModuleType) else []:
                yield name, value, getattr(value, "__code__", None)
                if isinstance(value, type) and value.__module__.startswith("torch.distributed"):
                    for attribute, method in list(vars(value).items()):
                        yield f"{value.__name__}.{attribute}", method, getattr(method, "__code__", None)


@pytest.fixture(scope="module")
def replaced() -> set[str]:
    """Returns names whose value, or whose code, is another one while funcol is installed."""
    before = [(name, value, code) for name, value, code in functions()]
    with funcol.installed():
        now = [(name, value, code) for name, value, code in functions()]
    kept = {(name, id(value), id(code)) for name, value, code in before}
    return {name for name, value, code in now if (name, id(value), id(code)) not in kept}


@pytest.fixture(scope="module")
def named() -> set[str]:
    """Returns names on the page, methods with their class."""
    text = (DOCS / "guides" / "replaced.md").read_text()
    tables = [line for line in text.splitlines() if line.startswith("| ") and "funcol." not in line]
    found = set()
    for line in tables:
        first = line.split("|")[1]
        owner, _, members = first.partition(": ")
        prefix = f"{owner.strip(' `')}." if members else ""
        found |= {prefix + name for name in re.findall(r"`(\w+(?:\.\w+)?)`", members or first)}
    return found


def test_each_replaced_function_is_named(replaced: set[str], named: set[str]) -> None:
    assert len(replaced) > 50
    assert {BEHIND.get(name, name) for name in replaced} - named == set()


def test_each_named_function_of_the_collectives_is_replaced(replaced: set[str], named: set[str]) -> None:
    public = {name for name in named if hasattr(stock, name)}
    assert len(public) > 20
    assert public <= replaced


def test_each_named_function_exists(named: set[str]) -> None:
    names = {name for name, _, _ in functions()}
    # Attributes of base classes, one of the dispatcher's object, and a function within local_map.
    of_bases = {"DTensor.data", "Replicate.__eq__", "Partial.__eq__"}
    own = {*of_bases, "OpDispatcher.sharding_propagator", "_local_map_wrapped", "local_map"}
    assert named - names - own == set()


@pytest.mark.parametrize("name", ["wait", "trigger_wait", "completed", "elem"])
def test_results_get_the_attributes_that_the_page_names(name: str) -> None:
    assert f"`{name}`" in (DOCS / "guides" / "replaced.md").read_text()
    assert not hasattr(torch.Tensor, name)
    with funcol.installed():
        assert hasattr(torch.Tensor, name)
