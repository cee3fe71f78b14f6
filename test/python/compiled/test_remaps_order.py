"""When an in-place collective of a compiled region is finished: where its graph waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from graphs import graph_of, targets_in
from ranks import on_ranks
from slow_collectives import same
from torch import Tensor
from torch.fx import GraphModule
from torch.testing._internal.two_tensor import TwoTensor

WORLD = 2
RANK = 1
pytestmark = pytest.mark.usefixtures("fake_world", "_fresh_compiler")


def order_of(program: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """Returns the ops of the graph that Dynamo makes, in order."""
    orders: list[list[str]] = []

    def record(graph: GraphModule, _: Any) -> Any:
        orders.append(
            [
                getattr(node.target, "__name__", node.target)
                for node in graph.graph.nodes
                if node.op.startswith("call")
            ]
        )
        return graph.forward

    torch.compile(program, backend=record, fullgraph=True)(*inputs)
    (order,) = orders
    return [str(name) for name in order]


def overlaps(x: Tensor, y: Tensor) -> Any:
    work = dist.all_reduce(x, async_op=True)
    z = y.exp()
    work.wait()
    return z, x.sin()


def reads_early(x: Tensor, y: Tensor) -> Any:
    work = dist.all_reduce(x, async_op=True)
    z = y.exp() + x.cos()
    work.wait()
    return z, x.sin()


def reads_through_a_wrapper_early(x: Tensor, y: Tensor) -> Any:
    wrapper = TwoTensor(x, y)
    work = dist.all_reduce(x, async_op=True)
    z = y.exp(), wrapper.cos()
    work.wait()
    return z, x.sin()


def reads_an_alias_early(x: Tensor, y: Tensor) -> Any:
    alias = x.view(-1)
    work = dist.all_reduce(x, async_op=True)
    z = y.exp(), alias.cos()
    work.wait()
    return z, x.sin()


def never_waits(x: Tensor, y: Tensor) -> Any:
    dist.all_reduce(x, async_op=True)
    return y.exp(), x.sin()


def waits_for_the_later_one(x: Tensor, y: Tensor) -> Any:
    dist.all_reduce(x, async_op=True)
    work = dist.all_reduce(y, async_op=True)
    z = torch.ones(3).exp()
    work.wait()
    return z, x.sin(), y.cos()


def waits_in_reverse(x: Tensor, y: Tensor) -> Any:
    first = dist.all_reduce(x, async_op=True)
    second = dist.all_reduce(y, async_op=True)
    second.wait()
    z = y.exp()
    first.wait()
    return z, x.sin()


def waits_twice(x: Tensor, y: Tensor) -> Any:
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    z = y.exp()
    work.wait()
    return z, x.sin()


END = ["wait_tensor", "copy_"]

ORDERS: dict[Callable[..., Any], list[str]] = {
    overlaps: ["all_reduce", "exp", *END, "sin"],
    reads_early: ["all_reduce", "exp", *END, "cos", "add", "sin"],
    reads_an_alias_early: ["view", "all_reduce", "exp", *END, "cos", "sin"],
    reads_through_a_wrapper_early: ["TwoTensor", "all_reduce", "exp", *END, "cos", "sin"],
    never_waits: ["all_reduce", *END, "exp", "sin"],
    waits_for_the_later_one: ["all_reduce", *END, "all_reduce", "ones", "exp", *END, "sin", "cos"],
    waits_in_reverse: ["all_reduce", "all_reduce", *END, "exp", *END, "sin"],
    waits_twice: ["all_reduce", *END, "exp", "wait_tensor", "sin"],
}


@pytest.mark.parametrize("program", ORDERS, ids=lambda program: program.__name__)
def test_the_graph_waits_where_the_program_does_or_at_the_first_use(program: Callable[..., Any]) -> None:
    assert order_of(program, torch.ones(2, 3), torch.ones(2, 3)) == ORDERS[program]


def test_the_order_outlives_aot_autograd() -> None:
    targets = targets_in(graph_of(overlaps, torch.ones(2, 3), torch.ones(2, 3)))
    reduced, exp, waited = (
        next(i for i, target in enumerate(targets) if name in target)
        for name in ("all_reduce", "exp", "wait_tensor")
    )
    assert reduced < exp < waited


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", [program.__name__ for program in ORDERS])
@on_ranks(WORLD)
def test_an_asynchronous_collective_is_finished_when_the_region_ends(
    rank: int, world: int, program: str, backend: str
) -> None:
    x, y = torch.full((2, 3), rank + 1.0), torch.full((2, 3), rank + 2.0)
    torch._dynamo.reset()
    torch.compile(globals()[program], backend=backend, fullgraph=True)(x, y)
    assert same(x, torch.full((2, 3), 3.0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(WORLD)
def test_a_read_before_the_wait_sees_finished_data(rank: int, world: int, backend: str) -> None:
    x, y = torch.full((2, 3), rank + 1.0), torch.zeros(2, 3)
    torch._dynamo.reset()
    z, _ = torch.compile(reads_early, backend=backend, fullgraph=True)(x, y)
    torch.testing.assert_close(z, 1 + torch.full((2, 3), 3.0).cos())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(WORLD)
def test_a_work_may_leave_the_region(rank: int, world: int, backend: str) -> None:
    def program(x: Tensor) -> Any:
        return dist.all_reduce(x, async_op=True), x * 2

    x = torch.full((3,), rank + 1.0)
    torch._dynamo.reset()
    work, doubled = torch.compile(program, backend=backend, fullgraph=True)(x)
    assert work.is_completed()
    assert work.wait() is True
    assert same(x, torch.full((3,), 3.0))
    assert same(doubled, torch.full((3,), 6.0))


@on_ranks(WORLD)
def test_a_graph_break_may_lie_between_call_and_wait(rank: int, world: int) -> None:
    @torch.compile(backend="aot_eager")
    def program(x: Tensor) -> Tensor:
        work = dist.all_reduce(x, async_op=True)
        torch._dynamo.graph_break()
        work.wait()
        return x + 1

    torch._dynamo.reset()
    assert same(program(torch.full((3,), rank + 1.0)), torch.full((3,), 4.0))
