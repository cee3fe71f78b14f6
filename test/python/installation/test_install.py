"""funcol.install(): what is replaced, and that all of it goes back."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as stock
from differential import sample, world_group
from ranks import on_ranks
from torch_state import attributes_of_torch, kernels_of

import funcol
from funcol import _C, installation
from funcol.commands.info import info

OPS = _C.ops_with_core_kernels()


pytestmark = pytest.mark.usefixtures("_not_installed")


DEVICE_KEYS = ["CPU", "CUDA"]


@pytest.fixture
def torch_module() -> Iterator[Callable[[str], ModuleType]]:
    """Makes a module of PyTorch from its source."""
    names = []

    def make(source: str) -> ModuleType:
        name = f"torch.made_for_a_test_{len(names)}"
        module = ModuleType(name)
        sys.modules[name] = module
        names.append(name)
        exec(source, vars(module))
        return module

    yield make
    for name in names:
        del sys.modules[name]


# Replaced functions


@pytest.mark.parametrize("name", installation.replaced_functions())
def test_a_function_of_pytorch_is_that_of_funcol_while_installed(name: str) -> None:
    with funcol.installed():
        assert getattr(stock, name) is getattr(funcol, name)


@pytest.mark.parametrize(
    "name",
    [
        *["all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"],
        *["permute_tensor", "wait_tensor", "all_reduce_coalesced", "all_gather_into_tensor_coalesced"],
        "reduce_scatter_tensor_coalesced",
    ],
)
def test_the_collectives_are_among_what_is_replaced(name: str) -> None:
    assert name in installation.replaced_functions()


@pytest.mark.parametrize("name", ["AsyncCollectiveTensor", "_maybe_wrap_tensor", "_resolve_group_name"])
def test_other_names_stay_those_of_pytorch(name: str) -> None:
    before = getattr(stock, name)
    with funcol.installed():
        assert getattr(stock, name) is before


def test_dynamo_finds_each_function_it_rewrites_to_under_its_name() -> None:
    with funcol.installed():
        rewritten = stock.traceable_collective_remaps.values()
        assert [function for function in rewritten if getattr(stock, function.__name__) is not function] == []


def test_what_is_replaced_is_the_same_asked_before_and_after() -> None:
    before = installation.replaced_functions()
    with funcol.installed():
        assert installation.replaced_functions() == before


@pytest.mark.parametrize("key", DEVICE_KEYS)
@pytest.mark.parametrize("op", OPS)
def test_an_operator_of_pytorch_has_a_kernel_of_funcol_while_installed(op: str, key: str) -> None:
    before = torch._C._dispatch_has_kernel_for_dispatch_key(op, key)
    with funcol.installed():
        assert (before, torch._C._dispatch_has_kernel_for_dispatch_key(op, key)) == (False, True)


@pytest.mark.parametrize("op", [op for op in OPS if not op.startswith("c10d_functional")])
def test_only_the_kernels_of_the_devices_change(op: str) -> None:
    def other_kernels() -> list[str]:
        table = torch._C._dispatch_dump_table(op).splitlines()
        return [line for line in table if line.split(":")[0] not in DEVICE_KEYS]

    before = other_kernels()
    with funcol.installed():
        assert other_kernels() == before


@pytest.mark.parametrize("imported", ["before", "after"])
def test_a_module_of_pytorch_has_funcols_function_and_gets_its_own_back(
    torch_module: Callable[[str], ModuleType], imported: str
) -> None:
    source = f"from {stock.__name__} import all_reduce as reduce"
    module = torch_module(source) if imported == "before" else None
    with funcol.installed():
        module = module or torch_module(source)
        assert module.reduce is funcol.all_reduce
    assert module.reduce is stock.all_reduce


@pytest.mark.parametrize("name", installation.replaced_functions())
def test_a_module_that_imported_a_name_while_installed_gets_that_of_pytorch(
    torch_module: Callable[[str], ModuleType], name: str
) -> None:
    with funcol.installed():
        module = torch_module(f"from {stock.__name__} import {name}")
    assert getattr(module, name) is getattr(stock, name)


def of_functions() -> list[Any]:
    """Returns everything of the replaced functions that may change."""
    held = [getattr(stock, name) for name in installation.replaced_functions()]
    return [
        (one.__code__, one.__defaults__, one.__kwdefaults__, dict(vars(one)), str(inspect.signature(one)))
        for one in held
    ]


def test_uninstalling_leaves_the_functions_as_they_were() -> None:
    before = of_functions()
    with funcol.installed():
        pass
    assert of_functions() == before


@pytest.mark.parametrize("name", installation.replaced_functions())
def test_a_function_that_a_program_holds_keeps_its_signature(name: str) -> None:
    held = getattr(stock, name)
    before = inspect.signature(held)
    with funcol.installed():
        assert inspect.signature(held) == before


HELD = {name: getattr(stock, name) for name in installation.replaced_functions()}

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "all_reduce": ("sum",),
    "all_gather_tensor": (0,),
    "reduce_scatter_tensor": ("sum", 0),
    "all_to_all_single": (None, None),
    "broadcast": (0,),
}


@on_ranks(2)
def test_what_a_program_imported_by_name_calls_funcol(rank: int, world: int) -> None:
    group, x = world_group(), sample(rank, (4, 2))
    for name, arguments in ARGUMENTS.items():
        expected = HELD[name](x, *arguments, group) + 0
        with funcol.installed():
            result = HELD[name](x, *arguments, group=group)
            assert type(result) is torch.Tensor, name
            assert funcol.is_pending(result), name
            torch.testing.assert_close(HELD["wait_tensor"](result), expected, rtol=0, atol=0)
        assert type(HELD[name](x, *arguments, group)) is stock.AsyncCollectiveTensor, name


@on_ranks(2)
def test_a_compiled_region_of_what_a_program_imported_has_the_graph_of_pytorch(rank: int, world: int) -> None:
    group, x = world_group(), sample(rank, (4, 2))
    graphs: list[list[str]] = []

    def collect(module: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        # In older releases funcol asks for what PyTorch's own operators do in newer ones.
        names = [str(node.target) for node in module.graph.nodes]
        graphs.append([name for name in names if name != "contiguous"])
        return module

    @torch.compile(fullgraph=True, backend=collect)
    def reduces_and_scatters(x: torch.Tensor) -> torch.Tensor:
        reduced = HELD["all_reduce"](x, "sum", group)
        return HELD["wait_tensor"](HELD["reduce_scatter_tensor"](reduced * 2, "sum", 0, group)) + 1

    expected = reduces_and_scatters(x)
    for context in (funcol.installed, nullcontext):
        for call in range(3):
            with context():
                assert torch.equal(reduces_and_scatters(x), expected), call
    assert graphs[1:] == graphs[:1] * (len(graphs) - 1)
    assert len(graphs) <= 2


def test_what_a_program_put_over_funcol_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = object()
    monkeypatch.setattr(stock, "broadcast", stock.broadcast)
    with funcol.installed():
        stock.broadcast = wrapper
    assert stock.broadcast is wrapper


@pytest.mark.parametrize(
    ("context", "state"), [(nullcontext, "not installed"), (funcol.installed, "installed")]
)
def test_info_says_whether_it_is_installed_and_what_it_stands_in_for(
    context: Callable[[], AbstractContextManager[None]], state: str
) -> None:
    with context():
        rows = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in info().splitlines())
    counts = f"{len(installation.replaced_functions())} functions and {len(OPS)} operators"
    assert rows["in this process"] == state
    assert rows["install() replaces"] == f"{counts} of PyTorch"


# All of it goes back


def test_uninstalling_leaves_every_attribute_of_pytorch_as_it_was() -> None:
    before = attributes_of_torch()
    with funcol.installed():
        assert attributes_of_torch() != before
    assert attributes_of_torch() == before


@pytest.mark.parametrize("op", OPS)
def test_uninstalling_leaves_the_kernels_of_an_operator_as_they_were(op: str) -> None:
    before = kernels_of(op)
    with funcol.installed():
        assert kernels_of(op) != before
    assert kernels_of(op) == before


def test_the_table_of_dynamo_is_as_it_was() -> None:
    before = list(stock.traceable_collective_remaps.items())
    with funcol.installed():
        pass
    assert list(stock.traceable_collective_remaps.items()) == before


def test_an_installation_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = attributes_of_torch(), [kernels_of(op) for op in OPS]

    def fails(*arguments: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(installation._Installation, "_replace", fails)
        with pytest.raises(MemoryError):
            funcol.install()
    assert not installation.is_installed()
    assert (attributes_of_torch(), [kernels_of(op) for op in OPS]) == before


@pytest.mark.parametrize("function", [funcol.install, funcol.installed])
@pytest.mark.parametrize("argument", ["cpu", False])
def test_arguments_are_given_by_keyword(function: Any, argument: Any) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        function(argument)
    assert not installation.is_installed()
