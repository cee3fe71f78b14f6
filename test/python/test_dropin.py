"""funcol.install(): what is replaced, and that all of it goes back."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from differential import sample, world_group
from ranks import run_ranks

import funcol
from funcol import _C, dropin
from funcol.commands.info import info

OPS = _C.ops_under_dropin()
DEVICE_KEYS = ["CPU", "CUDA"]


@pytest.fixture(autouse=True)
def _not_installed() -> Iterator[None]:
    assert not dropin.is_installed()
    yield
    funcol.uninstall()


def attributes_of_torch() -> dict[tuple[str, str], int]:
    """Identity of every attribute of every module of PyTorch."""
    return {
        (name, attribute): id(value)
        for name, module in sorted(sys.modules.items())
        if isinstance(module, ModuleType) and name.split(".")[0] == "torch"
        for attribute, value in vars(module).items()
    }


def kernels_of(op: str) -> str:
    """Every registration of ``op`` and what serves each key."""
    return torch._C._dispatch_dump(op) + torch._C._dispatch_dump_table(op)


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


# What is replaced


@pytest.mark.parametrize("name", dropin.replaced_functions())
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
    assert name in dropin.replaced_functions()


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
    before = dropin.replaced_functions()
    with funcol.installed():
        assert dropin.replaced_functions() == before


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


@pytest.mark.parametrize("name", dropin.replaced_functions())
def test_a_module_that_imported_a_name_while_installed_gets_that_of_pytorch(
    torch_module: Callable[[str], ModuleType], name: str
) -> None:
    with funcol.installed():
        module = torch_module(f"from {stock.__name__} import {name}")
    assert getattr(module, name) is getattr(stock, name)


def of_functions() -> list[Any]:
    """Everything of the replaced functions that may change."""
    held = [getattr(stock, name) for name in dropin.replaced_functions()]
    return [
        (one.__code__, one.__defaults__, one.__kwdefaults__, dict(vars(one)), str(inspect.signature(one)))
        for one in held
    ]


def test_uninstalling_leaves_the_functions_as_they_were() -> None:
    before = of_functions()
    with funcol.installed():
        pass
    assert of_functions() == before


@pytest.mark.parametrize("name", dropin.replaced_functions())
def test_a_function_that_a_program_holds_keeps_its_signature(name: str) -> None:
    held = getattr(stock, name)
    before = inspect.signature(held)
    with funcol.installed():
        assert inspect.signature(held) == before


HELD = {name: getattr(stock, name) for name in dropin.replaced_functions()}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "all_reduce": ("sum",),
    "all_gather_tensor": (0,),
    "reduce_scatter_tensor": ("sum", 0),
    "all_to_all_single": (None, None),
    "broadcast": (0,),
}


def calls_what_it_imported(rank: int, world: int) -> None:
    group, x = world_group(), sample(rank, (4, 2))
    for name, arguments in ARGUMENTS.items():
        expected = HELD[name](x, *arguments, group) + 0
        with funcol.installed():
            result = HELD[name](x, *arguments, group=group)
            assert type(result) is torch.Tensor, name
            assert funcol.is_pending(result), name
            torch.testing.assert_close(HELD["wait_tensor"](result), expected, rtol=0, atol=0)
        assert type(HELD[name](x, *arguments, group)) is stock.AsyncCollectiveTensor, name


def test_what_a_program_imported_by_name_calls_funcol() -> None:
    run_ranks(calls_what_it_imported, 2)


def compiles_what_it_imported(rank: int, world: int) -> None:
    group, x = world_group(), sample(rank, (4, 2))
    graphs: list[list[str]] = []

    def collect(module: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        # In older minors funcol asks for what PyTorch's own operators do in newer ones.
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


def test_a_compiled_region_of_what_a_program_imported_has_the_graph_of_pytorch() -> None:
    run_ranks(compiles_what_it_imported, 2)


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
        (row,) = [line for line in info().splitlines() if line.startswith("drop-in")]
    counts = f"{len(dropin.replaced_functions())} functions and {len(OPS)} operators"
    assert row.split(None, 1)[1] == f"{state}; stands in for {counts} of PyTorch"


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
        patch.setattr(dropin._Installation, "_replace", fails)
        with pytest.raises(MemoryError):
            funcol.install()
    assert not dropin.is_installed()
    assert (attributes_of_torch(), [kernels_of(op) for op in OPS]) == before


# Installing twice, nesting, several threads


def test_uninstalling_once_undoes_installing_twice() -> None:
    before = attributes_of_torch()
    funcol.install()
    funcol.install()
    funcol.uninstall()
    assert attributes_of_torch() == before


def test_uninstalling_what_is_not_installed_does_nothing() -> None:
    before = attributes_of_torch()
    funcol.uninstall()
    assert attributes_of_torch() == before


def test_installing_again_works() -> None:
    funcol.install()
    funcol.uninstall()
    funcol.install()
    assert stock.all_reduce is funcol.all_reduce


def test_leaving_an_inner_context_leaves_it_installed() -> None:
    with funcol.installed():
        with funcol.installed():
            pass
        assert dropin.is_installed()
    assert not dropin.is_installed()


def test_leaving_a_context_inside_an_installation_leaves_it_installed() -> None:
    funcol.install()
    with funcol.installed():
        pass
    assert dropin.is_installed()


def test_what_was_installed_inside_a_context_stays() -> None:
    with funcol.installed():
        funcol.install()
    assert dropin.is_installed()


def test_uninstalling_inside_contexts_ends_them_all() -> None:
    with funcol.installed(), funcol.installed():
        funcol.uninstall()
        assert not dropin.is_installed()


def test_a_context_that_was_ended_inside_leaves_a_later_one_alone() -> None:
    ended = funcol.installed()
    ended.__enter__()
    funcol.uninstall()
    with funcol.installed():
        ended.__exit__(None, None, None)
        assert dropin.is_installed()


def test_an_error_inside_a_context_uninstalls() -> None:
    with pytest.raises(KeyError), funcol.installed():
        raise KeyError
    assert not dropin.is_installed()


def test_a_context_of_one_thread_outlives_that_of_another() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with funcol.installed():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with funcol.installed():
        thread.start()
        entered.wait()
    still = dropin.is_installed()
    leave.set()
    thread.join()
    assert (still, dropin.is_installed()) == (True, False)


@pytest.mark.parametrize("last", [funcol.install, funcol.uninstall])
def test_many_threads_at_once_leave_one_whole_state(last: Callable[[], None]) -> None:
    before = attributes_of_torch(), [kernels_of(op) for op in OPS]
    barrier = threading.Barrier(4)

    def toggle() -> None:
        barrier.wait()
        for _ in range(10):
            funcol.install()
            with funcol.installed():
                pass
            funcol.uninstall()

    threads = [threading.Thread(target=toggle) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last()
    assert dropin.is_installed() == (stock.all_reduce is funcol.all_reduce) == (last is funcol.install)
    funcol.uninstall()
    assert (attributes_of_torch(), [kernels_of(op) for op in OPS]) == before


def reduces_while_another_thread_toggles(rank: int, world: int) -> None:
    # Groups of their own: the ranks' threads must call in the same order.
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    done = threading.Event()
    failures: list[BaseException] = []

    def reduce(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        try:
            for step in range(60):
                x = torch.full((3,), float(step + rank))
                assert call(x).tolist() == [float(step * world + sum(range(world)))] * 3
        except BaseException as failure:
            failures.append(failure)

    def by_function(x: torch.Tensor) -> torch.Tensor:
        return stock.all_reduce(x, "sum", groups[0]) + 0

    def by_operator(x: torch.Tensor) -> torch.Tensor:
        reduced = torch.ops._c10d_functional.all_reduce(x, "sum", groups[1].group_name)
        return torch.ops._c10d_functional.wait_tensor(reduced)

    def toggle() -> None:
        while not done.is_set():
            with funcol.installed():
                pass

    toggling = threading.Thread(target=toggle)
    toggling.start()
    reducing = [threading.Thread(target=reduce, args=(call,)) for call in (by_function, by_operator)]
    for thread in reducing:
        thread.start()
    for thread in reducing:
        thread.join()
    done.set()
    toggling.join()
    assert failures == []


@pytest.mark.parametrize("world", [1, 2])
def test_collectives_in_flight_do_not_mind(world: int) -> None:
    run_ranks(reduces_while_another_thread_toggles, world)


# The process


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )


FORK = """
import os, threading
import torch, torch.distributed._functional_collectives as stock
import funcol
threads = threading.active_count(), len(os.listdir("/proc/self/task"))
funcol.install()
assert (threading.active_count(), len(os.listdir("/proc/self/task"))) == threads, "a thread was started"
child = os.fork()
if child == 0:
    assert stock.wait_tensor(torch.ones(2)).tolist() == [1.0, 1.0]
    funcol.uninstall()
    funcol.install()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_installing_starts_no_thread_and_the_process_may_fork() -> None:
    done = run_python(FORK)
    assert (done.stdout, done.stderr) == ("7\n", "")


def test_installing_warns_of_nothing() -> None:
    code = "import torch, funcol; funcol.install(); funcol.uninstall(); funcol.install()"
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Dispatch from Python


# Nobody is waited for: from the Python dispatcher some minors call PyTorch's kernels with the GIL, and a wait
# for gloo then may last for ever.
DISPATCH_FROM_PYTHON = """
import torch, funcol
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch._dispatch.python import enable_python_dispatcher

dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
group = dist.group.WORLD.group_name

def reduced():
    x = torch.ones(2)
    with enable_python_dispatcher():
        core, legacy = torch.ops._c10d_functional, torch.ops.c10d_functional
        one = core.wait_tensor(core.all_reduce(x, "sum", group))
        other = legacy.wait_tensor(legacy.all_reduce(x, "sum", "", [0, 1], 2))
        assert one.tolist() == other.tolist() == [1.0, 1.0]
        try:
            core.all_reduce(x, "median", group)
        except Exception as error:
            return "funcol" in str(error)

print(reduced())
with funcol.installed():
    print(reduced())
print(reduced())
"""


def test_the_python_dispatcher_follows_what_is_installed() -> None:
    done = run_python(DISPATCH_FROM_PYTHON)
    assert (done.stdout, done.returncode) == ("False\nTrue\nFalse\n", 0), done.stderr


# Rank 1 starts once a thread of rank 0 told it to, while rank 0 waits.
def waits_where_it_was_called_with_the_gil(rank: int, world: int) -> None:
    store = dist.PrefixStore("waits_with_the_gil", dist.distributed_c10d._get_default_store())
    go = threading.Timer(0.2, lambda: store.set("go", "go"))
    if rank == 0:
        go.start()
    else:
        store.wait(["go"])
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    started = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", world_group().group_name)
    waited = torch.ops._c10d_functional.wait_tensor.default.redispatch(below, started)
    assert waited.tolist() == [float(world)] * 2
    if rank == 0:
        go.join()
        store.delete_key("go")


def waits_with_the_gil_on_our_kernels(rank: int, world: int) -> None:
    with funcol.installed():
        waits_where_it_was_called_with_the_gil(rank, world)


def test_a_wait_called_with_the_gil_lets_other_threads_run() -> None:
    run_ranks(waits_with_the_gil_on_our_kernels, 2)


def results_of_pytorch_outlive_the_change(rank: int, world: int) -> Any:
    x = sample(rank, (3,))
    group = world_group()
    started_before = stock.all_reduce(x, "sum", group)
    with funcol.installed():
        started_inside = stock.all_reduce(x, "sum", group)
        operator_inside = torch.ops._c10d_functional.all_reduce(x, "sum", group.group_name)
        torch.testing.assert_close(started_before + 0, funcol.all_reduce(x, "sum", group) + 0, rtol=0, atol=0)
    assert type(started_before) is stock.AsyncCollectiveTensor
    assert funcol.is_pending(started_inside)
    torch.testing.assert_close(started_inside + 0, started_before + 0, rtol=0, atol=0)
    torch.testing.assert_close(stock.wait_tensor(operator_inside), started_before + 0, rtol=0, atol=0)


def test_results_of_either_side_outlive_the_change() -> None:
    run_ranks(results_of_pytorch_outlive_the_change, 2)
