"""The in-place forms: eagerly, and where a compiled region calls torch.distributed's own collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
import torch.testing._internal.distributed.fake_pg
from differential import sample, world_group
from ranks import run_ranks
from test_async_tensor import same
from test_compile import lines_of, targets_in
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule
from torch.testing._internal.two_tensor import TwoTensor

import funcol

WORLD = 2


@pytest.fixture(scope="module", autouse=True)
def _simulated_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


# Eagerly

# A form is given stock or funcol, a source of shape (4, 3) for each of `size` ranks, and what makes a
# destination of a shape. It returns what was returned and what should have been, the destination.
Destination = Callable[..., Tensor]
Form = Callable[[Any, Tensor, Destination, int], tuple[Any, Any]]


def all_reduce_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    x = new(4, 3).copy_(x)
    return api.all_reduce_inplace(x, "max" if not x.is_complex() else "sum"), x


def all_gather_tensor_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = new(4 * size, 3)
    return api.all_gather_tensor_inplace(out, x, world_group()), out


def all_gather_dim_1_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = new(4, 3 * size)
    return api.all_gather_tensor_inplace(out, x, world_group(), gather_dim=1), out


def reduce_scatter_tensor_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = new(4, 3)
    return api.reduce_scatter_tensor_inplace(out, torch.cat([x] * size)), out


def reduce_scatter_dim_1_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = new(4, 3)
    return api.reduce_scatter_tensor_inplace(out, torch.cat([x] * size, dim=1), scatter_dim=1), out


def all_to_all_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = new(4 * size, 3)
    return api.all_to_all_inplace(out, torch.cat([x + i for i in range(size)])), out


def all_gather_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = [new(4, 3) for _ in range(size)]
    return api.all_gather_inplace(out, x), out


FORMS: dict[str, Form] = {
    "all_reduce": all_reduce_form,
    "all_gather_tensor": all_gather_tensor_form,
    "all_gather_dim_1": all_gather_dim_1_form,
    "reduce_scatter_tensor": reduce_scatter_tensor_form,
    "reduce_scatter_dim_1": reduce_scatter_dim_1_form,
    "all_to_all": all_to_all_form,
    "all_gather": all_gather_form,
}
DESTINATIONS: dict[str, Callable[[torch.dtype, tuple[int, ...]], Tensor]] = {
    "contiguous": lambda dtype, shape: torch.zeros(shape, dtype=dtype),
    "transposed": lambda dtype, shape: torch.zeros(shape[::-1], dtype=dtype).permute(
        *range(len(shape) - 1, -1, -1)
    ),
    "part of a larger one": lambda dtype, shape: torch.zeros((2, *shape), dtype=dtype)[1],
}


def agrees_in_place(rank: int, world: int, form: str, destination: str, dtype: torch.dtype) -> None:
    def new(*shape: int) -> Tensor:
        return DESTINATIONS[destination](dtype, shape)

    x = sample(rank, (4, 3), dtype)
    expected, _ = FORMS[form](stock, x.clone(), new, world)
    returned, out = FORMS[form](funcol, x.clone(), new, world)
    assert returned is out
    for one, other in zip(*(r if isinstance(r, list) else [r] for r in (out, expected)), strict=True):
        assert not funcol.is_pending(one)
        assert same(one, other)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("destination", DESTINATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_does_what_that_of_pytorch_does(world: int, destination: str, form: str) -> None:
    run_ranks(agrees_in_place, world, form, destination, torch.float32)


OTHER_DTYPES = [
    (form, dtype)
    for form in FORMS
    for dtype in (torch.bfloat16, torch.int64, torch.complex64)
    if (form, dtype) != ("all_to_all", torch.complex64)  # which PyTorch's own refuses under gloo
]


@pytest.mark.parametrize(("form", "dtype"), OTHER_DTYPES)
def test_a_form_takes_other_dtypes(form: str, dtype: torch.dtype) -> None:
    run_ranks(agrees_in_place, 2, form, "contiguous", dtype)


def broadcasts(rank: int, world: int, destination: str, arguments: dict[str, int]) -> None:
    x = DESTINATIONS[destination](torch.float32, (2, 3)).fill_(rank)
    assert funcol.broadcast_inplace(x, **arguments) is x
    assert same(x, torch.full((2, 3), 1.0))


@pytest.mark.parametrize("arguments", [{"src": 1}, {"group_src": 1}])
@pytest.mark.parametrize("destination", DESTINATIONS)
def test_broadcast_in_place_gives_every_rank_the_tensor_of_the_source(
    destination: str, arguments: dict[str, int]
) -> None:
    run_ranks(broadcasts, 2, destination, arguments)


def counts_peers(rank: int, world: int, compiled: bool) -> None:
    def broadcast_from_global_2(x: Tensor) -> Tensor:
        dist.broadcast(x, 2, group)
        return x + 0

    group = dist.new_group([1, 2])
    if rank > 0:
        x = torch.tensor([rank])
        if compiled:
            x = torch.compile(broadcast_from_global_2, backend="eager", fullgraph=True)(x)
        else:
            funcol.broadcast_inplace(x, 2, group)
        assert x.item() == 2
        dist.destroy_process_group(group)


@pytest.mark.parametrize("compiled", [False, True])
def test_src_is_a_rank_of_the_world_in_a_smaller_group_too(compiled: bool) -> None:
    run_ranks(counts_peers, 3, compiled)


def gathers_scalars(rank: int, world: int) -> None:
    parts = [torch.zeros(()) for _ in range(world)]
    assert funcol.all_gather_inplace(parts, torch.tensor(float(rank))) is parts
    assert [part.item() for part in parts] == list(range(world))
    out = torch.zeros(world)
    assert funcol.all_gather_tensor_inplace(out, torch.tensor(float(rank))) is out
    assert out.tolist() == list(range(world))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_numbers_are_gathered_as_tensors_of_one(world: int) -> None:
    run_ranks(gathers_scalars, world)


def scatters_a_list(rank: int, world: int, shape: tuple[int, ...]) -> None:
    out = torch.zeros(shape)
    inputs = [torch.full(shape, 10.0 * r + rank) for r in range(world)]
    assert funcol.reduce_scatter_inplace(out, inputs) is out
    assert same(out, torch.full(shape, 10.0 * rank * world + sum(range(world))))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)], ids=str)
def test_reduce_scatter_of_a_list(world: int, shape: tuple[int, ...]) -> None:
    run_ranks(scatters_a_list, world, shape)


def fills_any_shape(rank: int, world: int) -> None:
    x = torch.full((3, 2), float(rank))
    expected = torch.arange(float(world)).repeat_interleave(6)
    for shape in [(world, 3, 2), (6 * world,)]:
        out = torch.zeros(shape)
        assert same(funcol.all_gather_tensor_inplace(out, x), expected.view(shape))
    part = torch.zeros(3, 2)
    stacked = torch.arange(float(world)).view(world, 1, 1).expand(world, 3, 2)
    assert same(funcol.reduce_scatter_tensor_inplace(part, stacked), torch.full((3, 2), float(rank * world)))


def test_along_dim_0_only_the_number_of_elements_counts() -> None:
    run_ranks(fills_any_shape, 3)


def writes_into_its_own_input(rank: int, world: int) -> None:
    buffer = torch.zeros(world, 4)
    buffer[rank] = rank + 1
    funcol.all_gather_tensor_inplace(buffer, buffer[rank : rank + 1])
    assert buffer[:, 0].tolist() == [r + 1.0 for r in range(world)]
    funcol.reduce_scatter_tensor_inplace(buffer[0], buffer)
    assert buffer[0].tolist() == [world * (rank + 1.0)] * 4


def test_a_destination_may_lie_in_the_input() -> None:
    run_ranks(writes_into_its_own_input, 2)


def converts(rank: int, world: int) -> None:
    out = torch.zeros(2 * world, dtype=torch.float64)
    funcol.all_gather_tensor_inplace(out, torch.full((2,), rank, dtype=torch.int32))
    assert out.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_a_destination_of_another_dtype_is_converted_to() -> None:
    run_ranks(converts, 2)


def differentiates(rank: int, world: int) -> None:
    def gradient(api: Any) -> Tensor:
        x = torch.arange(3.0).requires_grad_()
        y = x * (rank + 1)
        api.all_reduce_inplace(y)
        (y * (rank + 1)).sum().backward()
        return x.grad

    assert same(gradient(funcol), gradient(stock))


def test_gradients_flow_through_a_form() -> None:
    run_ranks(differentiates, 2)


def test_autograd_notices_that_a_form_has_written() -> None:
    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3)
    product = weight * x
    funcol.all_reduce_inplace(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_a_parameter_is_broadcast_without_a_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        assert funcol.broadcast_inplace(parameter, 0) is parameter
    assert parameter.is_leaf
    assert parameter.requires_grad


def raises_before_sending(rank: int, world: int, call: str, says: str) -> None:
    x = torch.ones(4, 3)
    with pytest.raises(ValueError, match=says):
        eval(call, {"funcol": funcol, "torch": torch, "x": x})


REFUSED = {
    "funcol.all_reduce_inplace(x, async_op=True)": "async_op",
    "funcol.all_gather_inplace([x, x], x, async_op=True)": "async_op",
    "funcol.all_gather_tensor_inplace(torch.ones(7, 3), x)": "expected 24",
    "funcol.reduce_scatter_tensor_inplace(torch.ones(3), x)": "1/2",
    "funcol.all_to_all_inplace(torch.ones(5, 3), x)": "expected 12",
    "funcol.all_to_all_inplace(x, x, [1, 1], [2, 2])": "expected 6",
    "funcol.all_to_all_inplace(x[:3], x, None, [2, 2])": "output_split_sizes",
    "funcol.all_gather_inplace([x], x)": "one tensor per rank",
    "funcol.all_gather_inplace([x, x[:1]], x)": "one shape",
    "funcol.reduce_scatter_inplace(x, [x, x[:1]])": "one shape",
    "funcol.broadcast_inplace(x)": "src",
    "funcol.broadcast_inplace(x, 0, group_src=0)": "not both",
    "funcol.isend_inplace(x)": "group_dst",
    "funcol.irecv_inplace(x, 0, group_src=0)": "not both",
}


@pytest.mark.parametrize(("call", "says"), REFUSED.items())
def test_wrong_arguments_are_refused_before_anything_is_sent(call: str, says: str) -> None:
    run_ranks(raises_before_sending, 2, call, says)


def exchanges(rank: int, world: int, batched: bool) -> None:
    peer = 1 - rank
    out = torch.full((3,), rank + 1.0)
    buffer = torch.zeros(3)
    if batched:
        works = funcol.batch_p2p_ops_inplace(["isend", "irecv"], [peer] * 2, [5, 5], [out, buffer], None)
    else:
        works = [funcol.isend_inplace(out, peer, 5), funcol.irecv_inplace(buffer, group_src=peer, tag=5)]
    assert same(works[1], torch.full((3,), peer + 1.0))
    funcol.wait_tensors(works)
    assert same(buffer, torch.full((3,), peer + 1.0))


@pytest.mark.parametrize("batched", [False, True])
def test_point_to_point_forms_exchange_tensors(batched: bool) -> None:
    run_ranks(exchanges, 2, batched)


def fills_in_missing_splits(rank: int, world: int) -> None:
    x = torch.full((4, 2), float(rank))
    out = torch.zeros(4, 2)
    funcol.all_to_all_inplace(out, x, None, [2, 2])
    assert out[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    funcol.all_to_all_inplace(out, x + 1, [], [])
    assert out[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


def test_split_sizes_that_are_not_given_are_equal_shares() -> None:
    run_ranks(fills_in_missing_splits, 2)


def exchanges_in_a_region(rank: int, world: int, batched: bool, backend: str) -> None:
    peer = 1 - rank

    @torch.compile(backend=backend, fullgraph=True)
    def region(out: Tensor) -> Tensor:
        buffer = torch.zeros(3)
        if batched:
            works = funcol.batch_p2p_ops_inplace(["isend", "irecv"], [peer] * 2, [5, 5], [out, buffer], None)
        else:
            works = [funcol.isend_inplace(out, peer, 5), funcol.irecv_inplace(buffer, peer, 5)]
        return funcol.wait_tensors(works)[1] + 1

    torch._dynamo.reset()
    assert same(region(torch.full((3,), rank + 1.0)), torch.full((3,), peer + 2.0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("batched", [False, True])
def test_point_to_point_forms_can_be_traced(batched: bool, backend: str) -> None:
    run_ranks(exchanges_in_a_region, 2, batched, backend)


# In compiled regions


def reduces(x: Tensor, **options: Any) -> Any:
    return x, dist.all_reduce(x, dist.ReduceOp.MAX, **options)


def gathers(x: Tensor, **options: Any) -> Any:
    out = x.new_empty(8, 2)
    return out, dist.all_gather_into_tensor(out, x, **options)


def scatters(x: Tensor, **options: Any) -> Any:
    out = x.new_empty(2, 2)
    return out, dist.reduce_scatter_tensor(out, x, op=dist.ReduceOp.MIN, **options)


def exchanges_equally(x: Tensor, **options: Any) -> Any:
    out = torch.empty_like(x)
    return out, dist.all_to_all_single(out, x, **options)


def exchanges_splits(x: Tensor, **options: Any) -> Any:
    rank = dist.get_rank()
    splits = [3, 1] if rank == 0 else [2, 2]
    out = x.new_empty(5 if rank == 0 else 3, 2)
    return out, dist.all_to_all_single(out, x, [3, 2] if rank == 0 else [1, 2], splits, **options)


def gathers_a_list(x: Tensor, **options: Any) -> Any:
    out = [torch.empty_like(x) for _ in range(2)]
    return out, dist.all_gather(out, x, **options)


def scatters_from_a_list(x: Tensor, **options: Any) -> Any:
    out = torch.empty_like(x)
    return out, dist.reduce_scatter(out, [x, x * 3], **options)


def broadcasts_from_1(x: Tensor, **options: Any) -> Any:
    return x, dist.broadcast(x, 1, **options)


def broadcasts_from_group_0(x: Tensor, **options: Any) -> Any:
    return x, dist.broadcast(x, group_src=0, group=dist.group.WORLD, **options)


CALLS: dict[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (
        reduces,
        gathers,
        scatters,
        exchanges_equally,
        exchanges_splits,
        gathers_a_list,
        scatters_from_a_list,
        broadcasts_from_1,
        broadcasts_from_group_0,
    )
}


def as_list(out: Tensor | list[Tensor]) -> list[Tensor]:
    return out if isinstance(out, list) else [out]


def synchronous(call: Callable[..., Any]) -> Callable[[Tensor], Any]:
    def program(x: Tensor) -> Any:
        out, returned = call(x)
        return [part + 1 for part in as_list(out)], returned

    return program


def asynchronous(call: Callable[..., Any]) -> Callable[[Tensor], Any]:
    def program(x: Tensor) -> Any:
        out, work = call(x, async_op=True)
        unrelated = torch.ones(3) * 2
        work.wait()
        return [part + 1 for part in as_list(out)], unrelated

    return program


STYLES = {"synchronous": synchronous, "asynchronous": asynchronous}


def computes_what_it_does_eagerly(rank: int, world: int, call: str, style: str, backend: str) -> None:
    program = STYLES[style](CALLS[call])
    inputs = [torch.arange(8.0).reshape(4, 2) * (rank + 1) for _ in range(2)]
    torch._dynamo.reset()
    actual = torch.compile(program, backend=backend, fullgraph=True)(inputs[0])
    expected = program(inputs[1])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert same(*inputs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("call", CALLS)
def test_a_compiled_program_computes_what_it_does_eagerly(call: str, style: str, backend: str) -> None:
    run_ranks(computes_what_it_does_eagerly, WORLD, call, style, backend)


def all_in_one(x: Tensor) -> Any:
    gathered = x.new_empty(8, 2)
    work = dist.all_gather_into_tensor(gathered, x * 1, async_op=True)
    dist.all_reduce(x)
    y = x * 2
    work.wait()
    dist.broadcast(y, 1, async_op=True).wait()
    part = x.new_empty(4, 2)
    dist.reduce_scatter_tensor(part, gathered + 1)
    return part @ y.t() + gathered.sum()


def computes_with_inductor(rank: int, world: int) -> None:
    inputs = [torch.arange(8.0).reshape(4, 2) * (rank + 1) for _ in range(2)]
    torch._dynamo.reset()
    actual = torch.compile(all_in_one, backend="inductor", fullgraph=True)(inputs[0])
    torch.testing.assert_close(actual, all_in_one(inputs[1]))
    torch.testing.assert_close(*inputs)


def test_inductor_computes_what_the_program_does_eagerly() -> None:
    run_ranks(computes_with_inductor, WORLD, timeout=200)


def graph_of(program: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """The one graph that AOTAutograd makes of ``program``."""
    graphs: list[GraphModule] = []

    def record(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(program, backend=aot_autograd(fw_compiler=record), fullgraph=True)(*inputs)
    (graph,) = graphs
    return graph


OPS = {
    "reduces": "all_reduce",
    "gathers": "all_gather_into_tensor",
    "scatters": "reduce_scatter_tensor",
    "exchanges_equally": "all_to_all_single",
    "exchanges_splits": "all_to_all_single",
    "gathers_a_list": "all_gather_into_tensor",
    "scatters_from_a_list": "reduce_scatter_tensor",
    "broadcasts_from_1": "broadcast",
    "broadcasts_from_group_0": "broadcast",
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("call", CALLS)
def test_the_graph_holds_one_functional_op_and_one_wait(call: str, style: str) -> None:
    graph = graph_of(STYLES[style](CALLS[call]), torch.ones(4, 2))
    collectives = [target for target in targets_in(graph) if "c10d" in target]
    assert collectives == [f"_c10d_functional.{OPS[call]}.default", "_c10d_functional.wait_tensor.default"]


@pytest.fixture
def _without_remaps() -> Iterator[None]:
    funcol.tracing.remap_collectives(False)
    yield
    funcol.tracing.remap_collectives(True)


TRACED_BY_ALL_MINORS = [
    "reduces",
    "gathers",
    "scatters",
    "exchanges_equally",
    "exchanges_splits",
    "gathers_a_list",
]


@pytest.mark.parametrize("call", TRACED_BY_ALL_MINORS)
def test_the_graph_of_a_call_that_pytorch_can_trace_is_the_same(
    call: str, request: pytest.FixtureRequest
) -> None:
    def program(x: Tensor) -> Any:
        out, _ = CALLS[call](x)
        return [part + 1 for part in as_list(out)]

    actual = graph_of(program, torch.ones(4, 2))
    request.getfixturevalue("_without_remaps")
    expected = graph_of(program, torch.ones(4, 2))
    assert lines_of(actual.graph) == lines_of(expected.graph)


@pytest.mark.usefixtures("_without_remaps")
@pytest.mark.parametrize(
    "program", [synchronous(broadcasts_from_1), asynchronous(reduces)], ids=["broadcast", "async"]
)
def test_without_remaps_pytorch_is_as_it_was(program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Unsupported):
        torch.compile(program, backend="eager", fullgraph=True)(torch.ones(4, 2))


# When an asynchronous collective is finished


def order_of(program: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """The ops of the graph that Dynamo makes, in order."""
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


def reads_finished_data(rank: int, world: int, program: str, backend: str) -> None:
    x, y = torch.full((2, 3), rank + 1.0), torch.full((2, 3), rank + 2.0)
    torch._dynamo.reset()
    torch.compile(globals()[program], backend=backend, fullgraph=True)(x, y)
    assert same(x, torch.full((2, 3), 3.0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", [program.__name__ for program in ORDERS])
def test_an_asynchronous_collective_is_finished_when_the_region_ends(program: str, backend: str) -> None:
    run_ranks(reads_finished_data, WORLD, program, backend)


def early_reads(rank: int, world: int, backend: str) -> None:
    x, y = torch.full((2, 3), rank + 1.0), torch.zeros(2, 3)
    torch._dynamo.reset()
    z, _ = torch.compile(reads_early, backend=backend, fullgraph=True)(x, y)
    torch.testing.assert_close(z, 1 + torch.full((2, 3), 3.0).cos())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_read_before_the_wait_sees_finished_data(backend: str) -> None:
    run_ranks(early_reads, WORLD, backend)


def hands_out_its_work(rank: int, world: int, backend: str) -> None:
    def program(x: Tensor) -> Any:
        return dist.all_reduce(x, async_op=True), x * 2

    x = torch.full((3,), rank + 1.0)
    torch._dynamo.reset()
    work, doubled = torch.compile(program, backend=backend, fullgraph=True)(x)
    assert work.is_completed()
    assert work.wait() is True
    assert same(x, torch.full((3,), 3.0))
    assert same(doubled, torch.full((3,), 6.0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_work_may_leave_the_region(backend: str) -> None:
    run_ranks(hands_out_its_work, WORLD, backend)


def waits_after_a_break(rank: int, world: int) -> None:
    @torch.compile(backend="aot_eager")
    def program(x: Tensor) -> Tensor:
        work = dist.all_reduce(x, async_op=True)
        torch._dynamo.graph_break()
        work.wait()
        return x + 1

    torch._dynamo.reset()
    assert same(program(torch.full((3,), rank + 1.0)), torch.full((3,), 4.0))


def test_a_graph_break_may_lie_between_call_and_wait() -> None:
    run_ranks(waits_after_a_break, WORLD)


# What calls look like


def source_is_an_argument(rank: int, world: int) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def program(x: Tensor, src: int) -> Tensor:
        dist.broadcast(x, src)
        return x + 1

    torch._dynamo.reset()
    for src in (0, 1, 0):
        assert program(torch.tensor([rank]), src).item() == src + 1


def test_the_source_may_be_an_argument_of_the_region() -> None:
    run_ranks(source_is_an_argument, WORLD)


def test_async_op_may_be_an_argument_of_the_region() -> None:
    def program(x: Tensor, async_op: bool) -> Any:
        work = dist.all_reduce(x, dist.ReduceOp.SUM, None, async_op)
        return work is None, x + 1

    region = torch.compile(program, backend="eager", fullgraph=True)
    assert [region(torch.ones(2), async_op)[0] for async_op in (False, True, False)] == [True, False, True]


def test_new_sizes_cost_no_recompile() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def program(x: Tensor) -> Tensor:
        out = x.new_empty(WORLD * x.shape[0], x.shape[1])
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        work.wait()
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x)
        return out.sum() + parts[0].sum()

    for rows, columns in [(3, 5), (7, 4), (2, 9)]:
        program(torch.ones(rows, columns))
    assert counter.frame_count == 1


def uses_the_future(x: Tensor) -> Any:
    return dist.all_reduce(x, async_op=True).get_future()


def multiplies_first(x: Tensor) -> Any:
    return dist.all_reduce(x, PREMUL_SUM)


def gathers_too_little(x: Tensor) -> Any:
    return dist.all_gather_into_tensor(x.new_empty(3), x)


PREMUL_SUM = torch._C._distributed_c10d._make_nccl_premul_sum(2.0)
NOT_TRACED = {
    uses_the_future: "get_future",
    multiplies_first: "without a name",
    gathers_too_little: "expected 16",
}


@pytest.mark.parametrize("program", NOT_TRACED, ids=lambda program: program.__name__)
def test_what_cannot_be_traced_says_so_under_fullgraph(program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Unsupported, match=NOT_TRACED[program]):
        torch.compile(program, backend="eager", fullgraph=True)(torch.ones(4, 2))


def future_in_a_region(rank: int, world: int) -> None:
    def program(x: Tensor) -> Tensor:
        dist.all_reduce(x, async_op=True).get_future().wait()
        return x + 1

    torch._dynamo.reset()
    assert torch.compile(program, backend="eager")(torch.tensor([rank])).item() == 2


def test_what_cannot_be_traced_runs_eagerly_otherwise() -> None:
    run_ranks(future_in_a_region, WORLD)


FUNCOL_FIRST = """
import funcol, sys
assert "torch._dynamo" not in sys.modules
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)

@torch.compile(backend="eager", fullgraph=True)
def region(x):
    work = dist.broadcast(x, 0, async_op=True)
    work.wait()
    return x + 1

assert region(torch.ones(2)).tolist() == [2.0, 2.0]
"""


def test_funcol_may_be_imported_before_the_compiler() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FUNCOL_FIRST], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
