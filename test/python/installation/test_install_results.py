"""Results of collectives, used as programs use those of PyTorch: wait(), isinstance(), elem, completed."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as stock
from differential import sample, world_group
from ranks import on_ranks
from torch import Tensor, nn, overrides
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import funcol

ON_DEVICES = True

NAMES = ["wait", "trigger_wait", "completed", "elem"]


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    funcol.uninstall()


def pending(value: float = 1.0) -> Tensor:
    (tensor,) = funcol._C.make_pending([torch.full((2,), value)], lambda: None)
    return tensor


# Results of isinstance


def test_what_is_pending_is_an_instance_until_it_is_waited_for() -> None:
    tensor = pending()
    with funcol.installed():
        assert isinstance(tensor, AsyncCollectiveTensor)
        assert isinstance(tensor, (int, AsyncCollectiveTensor))
        tensor + 1
        assert not isinstance(tensor, AsyncCollectiveTensor)


@pytest.mark.parametrize(
    "other", [torch.ones(2), nn.Parameter(torch.ones(2)), 3, None, AsyncCollectiveTensor]
)
def test_nothing_else_is_an_instance(other: object) -> None:
    with funcol.installed():
        assert not isinstance(other, AsyncCollectiveTensor)


def test_what_pytorch_started_stays_an_instance() -> None:
    with funcol.installed():
        assert isinstance(AsyncCollectiveTensor(torch.ones(2)), AsyncCollectiveTensor)


def test_a_class_that_derives_from_it_has_no_pending_instances() -> None:
    with funcol.installed():

        class Derived(AsyncCollectiveTensor):
            pass

        tensor = pending()
        assert not isinstance(tensor, Derived)
        assert isinstance(Derived(torch.ones(2)), Derived)
        assert isinstance(Derived(torch.ones(2)), AsyncCollectiveTensor)
    assert not isinstance(tensor, Derived)
    tensor.sum()


def test_a_pending_tensor_is_no_instance_before_and_after() -> None:
    tensor = pending()
    assert not isinstance(tensor, AsyncCollectiveTensor)
    with funcol.installed():
        pass
    assert not isinstance(tensor, AsyncCollectiveTensor)
    tensor.sum()


# Methods


@pytest.mark.parametrize("name", ["wait", "trigger_wait"])
def test_a_result_is_waited_for(name: str) -> None:
    tensor = pending()
    with funcol.installed():
        assert getattr(tensor, name)() is tensor
        assert not funcol.is_pending(tensor)
        assert getattr(tensor, name)() is tensor


@pytest.mark.parametrize("name", ["wait", "trigger_wait"])
def test_a_view_of_a_result_that_is_over_can_be_waited_for(name: str) -> None:
    tensor = pending(3)
    with funcol.installed():
        tensor.sum()
        view = tensor.view(2, 1)
        assert getattr(view, name)() is view


def test_a_result_knows_whether_it_is_completed_and_has_its_elements() -> None:
    tensor = pending()
    with funcol.installed():
        assert (tensor.completed, tensor.elem is tensor) == (False, True)  # type: ignore[attr-defined]
        tensor.sum()
        assert (tensor.completed, tensor.elem is tensor) == (True, True)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["completed", "elem"])
def test_other_tensors_do_not_have_its_attributes(name: str) -> None:
    with funcol.installed():
        assert not hasattr(torch.ones(2), name)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_other_classes_have_neither(name: str) -> None:
    with funcol.installed():
        assert not hasattr(nn.Parameter(torch.ones(2)), name)
        with torch._subclasses.FakeTensorMode():
            assert not hasattr(torch.ones(2), name)


def test_a_class_may_store_attributes_of_these_names() -> None:
    class Holder(Tensor):
        pass

    with funcol.installed():
        holder = torch.ones(2).as_subclass(Holder)
        for name in NAMES:
            setattr(holder, name, 5)
            assert getattr(holder, name) == 5


def test_what_a_program_gave_tensors_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "wait", lambda self: "theirs", raising=False)
    with funcol.installed():
        assert torch.ones(2).wait() == "theirs"  # type: ignore[attr-defined]
    assert torch.ones(2).wait() == "theirs"  # type: ignore[attr-defined]


# State after uninstalling


def test_uninstalling_leaves_no_trace() -> None:
    def seen() -> Any:
        return type(AsyncCollectiveTensor), dict(vars(Tensor)), dict(vars(AsyncCollectiveTensor))

    before = seen()
    for _ in range(3):
        with funcol.installed():
            assert seen() != before
        gc.collect()
        assert seen() == before


def test_the_functions_that_can_be_overridden_are_the_same() -> None:
    overrides._get_overridable_functions.cache_clear()
    before = set(overrides.get_overridable_functions()[Tensor])
    overrides._get_overridable_functions.cache_clear()
    with funcol.installed():
        assert set(overrides.get_overridable_functions()[Tensor]) == before


DYNAMO_AFTER = """
import sys
import torch, funcol

with funcol.installed():
    assert "torch._dynamo" not in sys.modules
    import torch._dynamo.variables.tensor as tensors
print(sorted({"wait", "trigger_wait", "completed", "elem"} & set(tensors.all_tensor_attrs)))
"""


def test_dynamo_imported_while_installed_does_not_know_of_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DYNAMO_AFTER], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


# Programs


@on_ranks(2)
def test_a_program_that_waits_itself(rank: int, world: int) -> None:
    group, x = world_group(), sample(rank, (4, 3))

    def program() -> list[Tensor]:
        whole = stock.all_reduce(x, "sum", group).wait()
        gathered: Any = stock.all_gather_tensor(x, 0, group)
        assert isinstance(gathered, AsyncCollectiveTensor)
        view = gathered.view(-1)
        assert isinstance(view, AsyncCollectiveTensor)
        flat: Any = view.trigger_wait()
        parts: Any = stock.reduce_scatter_tensor(gathered.wait(), "sum", 0, group)
        assert not parts.completed
        if isinstance(parts, AsyncCollectiveTensor):
            parts = parts.trigger_wait()
        last: Any = stock.broadcast(x, 0, group)
        return [whole, flat, parts, stock.wait_tensor(last.elem)]

    expected = program()
    with funcol.installed():
        for result, other in zip(program(), expected, strict=True):
            assert type(result) is Tensor
            assert torch.equal(result, other)


@on_ranks(2)
def test_gradients_flow_through_a_wait(rank: int, world: int) -> None:
    group = world_group()

    def program() -> list[Tensor]:
        x = sample(rank, (4, 3)).requires_grad_()
        y: Any = stock.all_gather_tensor_autograd(x, 0, group)
        if isinstance(y, AsyncCollectiveTensor):
            y = y.wait()
        y.square().sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad]

    expected = program()
    with funcol.installed():
        for result, other in zip(program(), expected, strict=True):
            torch.testing.assert_close(result, other, rtol=0, atol=0)


@on_ranks(2)
def test_a_compiled_program_has_the_graph_of_pytorch(rank: int, world: int) -> None:
    group = world_group()
    graphs: list[list[str]] = []

    def collect(module: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        graphs.append([getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes])
        return module

    def program(x: Tensor) -> Tensor:
        y: Any = stock.all_reduce(x * 2, "sum", group)
        if isinstance(y, AsyncCollectiveTensor):
            y = y + 100
        return finish(y) + hasattr(y, "wait") + hasattr(y, "elem") + isinstance(x, AsyncCollectiveTensor)

    def finish(y: Any) -> Any:
        return y.wait() if dynamo_knows_wait else stock.wait_tensor(y)

    x = sample(rank, (4,))
    dynamo_knows_wait = True
    try:
        expected = torch.compile(program, fullgraph=True, backend=collect)(x)
    except torch._dynamo.exc.Unsupported:  # in older releases
        dynamo_knows_wait = False
        graphs.clear()
        expected = torch.compile(program, fullgraph=True, backend=collect)(x)
    torch._dynamo.reset()
    with funcol.installed():
        region = torch.compile(program, fullgraph=True, backend=collect)
        assert torch.equal(region(x), expected)
        region(stock.all_reduce(x, "sum", group))
        region(torch.ones(4))
    assert graphs == graphs[:1] * 2
