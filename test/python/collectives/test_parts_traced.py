"""Uneven and rooted collectives where there is no data, or a tracer looks on: shapes, graphs, values."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import LAYOUTS, assert_plain, sample, world_group
from graphs import check_graph
from metas import listed, metadata
from ranks import on_ranks, run_ranks
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from uneven_collectives import COLLECTIVES, Problem, each_collective, inputs_of

import funcol

# The parts of each problem, and where their root is.
PROBLEMS = {
    "dim 0": lambda world: Problem([3, 0, 2][:world], dim=0),
    "dim 1": lambda world: Problem([1, 3, 2][:world], dim=1, root=world - 1),
    "last dim": lambda world: Problem([2, 0, 1][:world], dim=-1, root=world - 1),
    "equal": lambda world: Problem([2] * world, dim=1),
}

each_problem = pytest.mark.parametrize("problem", PROBLEMS)


def call_of(name: str, problem: Problem, given_sizes: bool = True) -> Callable[[Tensor], Tensor]:
    sizes = list(problem.sizes) if given_sizes else None
    return lambda x: COLLECTIVES[name].call(x, problem, world_group(), sizes)


# Without data


def meta_agrees_with_real(
    rank: int, world: int, name: str, problem: str, layout: str, dtype: torch.dtype, fake: bool
) -> None:
    task = PROBLEMS[problem](world)
    call = call_of(name, task)
    x = LAYOUTS[layout](rank, COLLECTIVES[name].shape(task, rank), dtype)
    real = metadata(call(x))
    if fake:
        with FakeTensorMode() as mode:
            without_data = call(mode.from_tensor(x))
    else:
        without_data = call(x.to("meta"))
        assert without_data.device.type == "meta"
    assert metadata(without_data) == real


@each_collective
@each_problem
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [("offset", torch.float32), ("transposed", torch.bool), ("conjugated", torch.complex64)],
    ids=str,
)
def test_a_meta_tensor_gives_the_shape_and_strides_of_a_real_one(
    name: str, problem: str, layout: str, dtype: torch.dtype
) -> None:
    run_ranks(meta_agrees_with_real, 3, name, problem, layout, dtype, False)


@each_collective
@each_problem
@pytest.mark.parametrize(
    ("layout", "dtype"), [("offset", torch.float32), ("transposed", torch.int64)], ids=str
)
def test_a_fake_tensor_gives_the_shape_and_strides_of_a_real_one(
    name: str, problem: str, layout: str, dtype: torch.dtype
) -> None:
    run_ranks(meta_agrees_with_real, 3, name, problem, layout, dtype, True)


@pytest.mark.parametrize("world", [1, 3])
@each_collective
@on_ranks()
def test_a_meta_tensor_gives_the_shape_of_equal_parts(rank: int, world: int, name: str) -> None:
    task = Problem([2] * world, dim=1)
    x = sample(rank, COLLECTIVES[name].shape(task, rank))
    call = call_of(name, task, given_sizes=False)
    assert metadata(call(x.to("meta"))) == metadata(call(x))


# make_fx


def traces(
    rank: int, world: int, name: str, problem: str, mode: str, layout: str, dtype: torch.dtype
) -> None:
    task = PROBLEMS[problem](world)
    call = call_of(name, task)
    x = LAYOUTS[layout](rank, COLLECTIVES[name].shape(task, rank), dtype)
    graph = make_fx(lambda x: call(x) * 1, tracing_mode=mode)(x)
    check_graph(graph)
    assert_plain(graph(x), (call(x) * 1).clone())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("world", [1, 3])
@each_collective
@each_problem
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_trace_holds_ops_of_core_and_gives_the_same_values(
    world: int, name: str, problem: str, mode: str
) -> None:
    run_ranks(traces, world, name, problem, mode, "offset", torch.int32)


@each_collective
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("transposed", torch.float32),
        ("expanded", torch.float32),
        ("negated", torch.float32),
        ("conjugated", torch.complex64),
        ("offset", torch.complex64),
        ("strided", torch.bool),
    ],
    ids=str,
)
def test_a_trace_takes_any_layout(name: str, layout: str, dtype: torch.dtype) -> None:
    run_ranks(traces, 2, name, "dim 1", "real", layout, dtype)


@pytest.mark.sampled(4)
@each_collective
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("given_sizes", [True, False])
@on_ranks(2)
def test_a_graph_with_symbolic_sizes_serves_other_sizes(
    rank: int, world: int, name: str, dim: int, given_sizes: bool
) -> None:
    """Rank 0 has twice what the others have, or all have the same."""

    def program(x: Tensor) -> Tensor:
        of_shard = name in ("all_gather_tensor", "gather")
        unit = x.size(dim) // (2 if rank == 0 else 1) if of_shard else x.size(dim) // (world + 1)
        sizes = [2 * unit] + [unit] * (world - 1) if given_sizes else None
        return COLLECTIVES[name].call(x, Problem([0] * world, dim=dim, root=world - 1), world_group(), sizes)

    def inputs(unit: int, other: int) -> Tensor:
        sizes = [2 * unit] + [unit] * (world - 1) if given_sizes else [2 * unit] * world
        shape = list(COLLECTIVES[name].shape(Problem(sizes, dim=dim), rank))
        shape[2] = other
        return sample(rank, shape)

    graph = make_fx(program, tracing_mode="symbolic")(inputs(3, 4))
    check_graph(graph)
    x = inputs(5, 7)
    assert_plain(graph(x), program(x))


# On a rank of a group that sends nothing, since some releases hang when they wait for a real one there.
BEFORE_DISPATCH: dict[str, Callable[[Tensor, dist.ProcessGroup], Tensor]] = {
    "reduce": lambda x, group: funcol.reduce(x, "sum", 0, group),
    "scatter": lambda x, group: funcol.scatter(x, 0, 1, group),
    "gather": lambda x, group: funcol.gather(x, 0, 1, group),
    "all_gather": lambda x, group: funcol.all_gather_tensor(x, 0, group, split_sizes=[4, 2]),
    "reduce_scatter": lambda x, group: funcol.reduce_scatter_tensor(x, "sum", 1, group, split_sizes=[1, 5]),
}


class Calls(torch.nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


@pytest.mark.parametrize("name", BEFORE_DISPATCH)
@pytest.mark.parametrize("exported", [False, True])
@on_ranks(2)
def test_a_graph_recorded_before_dispatch_holds_ops_of_core(
    rank: int, world: int, name: str, exported: bool
) -> None:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    group = dist.new_group([0, 1], backend="fake")
    x = sample(0, (4, 6)) if rank == 0 else sample(0, (4 if name != "all_gather" else 2, 6))

    def call(x: Tensor) -> Tensor:
        return BEFORE_DISPATCH[name](x, group)

    if exported:
        check_graph(torch.export.export(Calls(call), (x,), strict=False).graph_module)
    else:
        # A fake group makes up what is received from what is sent, and in some releases refuses a rank that
        # receives only.
        mode = "fake" if name == "scatter" else "real"
        check_graph(make_fx(call, tracing_mode=mode, pre_dispatch=True)(x))


# torch.compile


@each_collective
@pytest.mark.parametrize(("problem", "dynamic"), [("dim 0", None), ("last dim", None), ("dim 1", True)])
@on_ranks(2)
def test_a_compiled_region_holds_ops_of_core_and_gives_the_same_values(
    rank: int, world: int, name: str, problem: str, dynamic: bool | None
) -> None:
    task = PROBLEMS[problem](world)
    call = call_of(name, task)
    graphs: list[GraphModule] = []

    def record(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x = inputs_of(name, task)[rank]
    group = world_group()

    def program(x: Tensor) -> Tensor:
        return COLLECTIVES[name].call(x * 2, task, group, list(task.sizes)) + 1

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=record)
    compiled = torch.compile(program, fullgraph=True, dynamic=dynamic, backend=backend)
    assert_plain(compiled(x), call(x * 2) + 1)
    (graph,) = graphs
    check_graph(graph)


@each_collective
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(2)
def test_a_compiled_region_takes_equal_parts(rank: int, world: int, name: str, backend: str) -> None:
    task = PROBLEMS["equal"](world)
    call = call_of(name, task, given_sizes=False)
    x = inputs_of(name, task)[rank]
    group = world_group()
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend)
    def program(x: Tensor) -> Tensor:
        return COLLECTIVES[name].call(x, task, group, None)

    assert_plain(program(x), call(x))


# Functions that move pairs of reals for complex numbers


CONJUGATED: dict[str, Callable[[Tensor], Any]] = {
    "all_to_all_single": lambda x: funcol.all_to_all_single(x, [2, 2], [2, 2], world_group()),
    "permute_tensor": lambda x: funcol.permute_tensor(x, [1, 0], world_group()),
    "all_to_all": lambda x: funcol.all_to_all([x[:2], x[2:]], None, world_group()),
    "all_gather_into_tensor_coalesced, 0 dims": lambda x: funcol.all_gather_into_tensor_coalesced(
        [x[0, 1], x], world_group()
    ),
    "all_gather_into_tensor_coalesced": lambda x: funcol.all_gather_into_tensor_coalesced(
        [x, 2 * x], world_group()
    ),
}


@pytest.mark.parametrize("name", CONJUGATED)
@on_ranks(2)
def test_a_trace_takes_conjugated_numbers(rank: int, world: int, name: str) -> None:
    x = LAYOUTS["conjugated"](rank, (4, 6), torch.complex64)
    graph = make_fx(lambda x: listed(CONJUGATED[name](x)))(x)
    check_graph(graph)
    for actual, expected in zip(graph(x), listed(CONJUGATED[name](x)), strict=True):
        assert_plain(actual, expected)
