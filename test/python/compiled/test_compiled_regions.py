"""Compiled regions that pending tensors are passed to: right results, and no recompiles."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from slow_collectives import SlowCollective, same, values
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import funcol

WORLD = 4
pytestmark = pytest.mark.usefixtures("fake_world", "_fresh_compiler")

KINDS: dict[str, Callable[[], Tensor]] = {
    "plain": values,
    "pending": lambda: SlowCollective(values()).tensor,
    "settled": lambda: funcol.wait_tensor(SlowCollective(values()).tensor),
}
BACKENDS = ["eager", "aot_eager", "inductor"]


def region_of_one(x: Tensor) -> Tensor:
    return x.t() * 2 + x.sum()


def region_of_three(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x.t() @ y + z.view(-1)[0]


def broken_region(x: Tensor) -> Tensor:
    y = x.t() * 2
    torch._dynamo.graph_break()
    return y + x.t()


REGIONS = {
    "one_input": (region_of_one, 1),
    "three_inputs": (region_of_three, 3),
    "graph_break": (broken_region, 1),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("region", "num_inputs"), REGIONS.values(), ids=REGIONS.keys())
def test_a_region_fed_pending_and_plain_inputs_in_turn_compiles_once(
    region: Callable[..., Tensor], num_inputs: int, backend: str
) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(region, backend=counter)
    expected = region(*[values()] * num_inputs)
    assert torch.allclose(compiled(*[values() for _ in range(num_inputs)]), expected)
    compiles = counter.frame_count
    for kinds in itertools.product(KINDS.values(), repeat=num_inputs):
        assert torch.allclose(compiled(*[kind() for kind in kinds]), expected)
    assert counter.frame_count == compiles


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first", KINDS.values(), ids=KINDS.keys())
def test_whatever_a_region_is_compiled_for_serves_all_the_others(
    first: Callable[[], Tensor], backend: str
) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(region_of_one, backend=counter, fullgraph=True)
    for kind in (first, *KINDS.values()):
        assert same(compiled(kind()), region_of_one(values()))
        assert same(compiled(kind().detach()), region_of_one(values()))
        assert same(compiled(kind().view(3, 4).t().t().detach()), region_of_one(values()))
    assert counter.frame_count == 1


def test_a_region_that_trains_a_pending_input_compiles_once() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(region_of_one, backend=counter, fullgraph=True)
    expected = values().requires_grad_()
    region_of_one(expected).sum().backward()
    for kind in KINDS.values():
        x = kind().requires_grad_()
        compiled(x).sum().backward()
        assert same(x.grad, expected.grad)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_break_between_a_collective_and_its_use_costs_no_recompile(backend: str) -> None:
    group = dist.group.WORLD

    def reduce_then_break(x: Tensor) -> Tensor:
        y = funcol.all_reduce(x, "sum", group)
        torch._dynamo.graph_break()
        return y.t() * 2

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(reduce_then_break, backend=counter)
    assert same(compiled(values()), values().t() * 2)
    compiles = counter.frame_count
    for kind in (*KINDS.values(), *KINDS.values()):
        assert same(compiled(kind()), values().t() * 2)
    assert counter.frame_count == compiles


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_collective_called_eagerly_inside_a_region_costs_no_recompile(backend: str) -> None:
    collectives: list[SlowCollective] = []
    plain_or_slow = itertools.cycle(["plain", "slow", "plain", "slow"])

    @torch._dynamo.disable
    def reduce(x: Tensor) -> Tensor:
        if next(plain_or_slow) == "plain":
            return x + 0
        collectives.append(SlowCollective(x))
        return collectives[-1].tensor

    def region(x: Tensor) -> Tensor:
        return reduce(x * 2).t() + 1

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(region, backend=counter)
    assert same(compiled(values()), values().t() * 2 + 1)
    compiles = counter.frame_count
    for _ in range(3):
        assert same(compiled(values()), values().t() * 2 + 1)
    assert counter.frame_count == compiles
    assert [c.num_waits for c in collectives] == [1, 1]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("breaks", [False, True], ids=["one_graph", "graph_break"])
def test_a_plain_tensor_may_take_over_the_data_of_a_pending_one_in_a_region(
    backend: str, breaks: bool
) -> None:
    @torch.compile(backend=backend)
    def replace(target: Tensor, source: Tensor) -> Tensor:
        doubled = target * 2
        if breaks:
            torch._dynamo.graph_break()
        target.data = source
        return doubled + target

    for _ in range(2):
        target = torch.ones(3, 4)
        collective = SlowCollective(values())
        assert same(replace(target, collective.tensor), values() + 2)
        assert same(target, values())
        assert collective.num_waits == 1


@pytest.mark.parametrize("end", ["returns", "breaks", "raises"])
def test_the_wake_key_is_hidden_inside_a_region_only(end: str) -> None:
    @torch.compile(backend="eager")
    def region(x: Tensor) -> Tensor:
        x = x + 1
        if end != "returns":
            torch._dynamo.graph_break()
        if end == "raises":
            raise ValueError("on purpose")
        return x * 2

    for _ in range(2):
        with contextlib.suppress(ValueError):
            region(values())
        collective = SlowCollective(values())
        assert funcol.is_pending(collective.tensor.view(-1))
        assert collective.num_waits == 0


def test_new_sizes_of_a_dynamic_region_cost_no_recompile() -> None:
    group = dist.group.WORLD
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def region(x: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x * 2, 1, group).sum(dim=0)

    for rows, columns in [(3, 5), (7, 4), (2, 9)]:
        assert region(torch.ones(rows, columns)).shape == (columns * WORLD,)
        assert region(SlowCollective(torch.ones(rows, columns)).tensor).shape == (columns * WORLD,)
    assert counter.frame_count == 1


USE_REGION = """
for _ in range(2):
    assert same(region(values()), values().t() * 2)
    assert same(region(SlowCollective(values()).tensor), values().t() * 2)
"""
DEFINE_REGION = """
import torch
from torch._dynamo.testing import CompileCounter
counter = CompileCounter()
region = torch.compile(lambda x: x.t() * 2, backend=counter)
"""
IMPORT_FUNCOL = "from slow_collectives import SlowCollective, same, values\n"
# In this file itself, the compiler is imported first.
ORDERS = {
    "funcol_first": (IMPORT_FUNCOL + DEFINE_REGION + USE_REGION, "assert counter.frame_count == 1"),
    "region_called_first": (DEFINE_REGION + "region(torch.ones(3, 4))\n" + IMPORT_FUNCOL + USE_REGION, ""),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("code", "check"), ORDERS.values(), ids=ORDERS.keys())
def test_the_order_of_imports_does_not_matter(code: str, check: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code + check], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
