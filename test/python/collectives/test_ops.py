"""``torch.ops.funcol``: schemas, results, in-place and out forms, waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import PROGRAM_SHAPE, WORLDS, assert_same, sample, world_group
from ranks import on_ranks
from torch import Tensor
from versions import TORCH

import funcol

ON_DEVICES = True

ops = torch.ops.funcol

each_world = pytest.mark.parametrize("world", WORLDS)


def name() -> str:
    return world_group().group_name


core = torch.ops._c10d_functional

OPS = [
    "all_reduce",
    "all_reduce_",
    "all_reduce_coalesced",
    "all_reduce_coalesced_",
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_out",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
    "broadcast_",
    "isend",
    "irecv",
    "batch_p2p_ops",
    "wait_tensor",
    "wait_tensors",
]


from_2_15 = pytest.mark.skipif(TORCH < (2, 15), reason="older releases have other schemas")


# Schemas


def signature(packet: Any) -> tuple[list[Any], list[Any]]:
    def parts(argument: Any) -> tuple[Any, ...]:
        alias = argument.alias_info
        writes = alias is not None and alias.is_write
        return (argument.name, str(argument.type), argument.default_value, argument.kwarg_only, writes)

    schema = packet.default._schema
    return [parts(argument) for argument in schema.arguments], [parts(result) for result in schema.returns]


@from_2_15
@pytest.mark.parametrize("op", OPS)
def test_the_schema_of_each_op_is_that_of_the_newest_pytorch(op: str) -> None:
    assert signature(getattr(ops, op)) == signature(getattr(core, op))


@pytest.mark.parametrize("op", OPS)
def test_each_op_exists_with_a_default_overload(op: str) -> None:
    assert getattr(ops, op).overloads() == ["default"]


@pytest.mark.parametrize("op", OPS)
def test_the_core_namespace_has_each_op(op: str) -> None:
    assert getattr(core, op).overloads() == ["default"]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("key", ["CPU", "CUDA", "Meta", "XPU", "PrivateUse1", "AutogradCPU"])
def test_each_op_has_a_kernel_for_each_kind_of_device(op: str, key: str) -> None:
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"funcol::{op}", key)


# Results


def x_of(rank: int) -> Tensor:
    return sample(rank, PROGRAM_SHAPE)


# op and function called alike: CALLS[name](x, group, world)
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_reduce": (
        lambda x, group, world: ops.all_reduce(x, "sum", group),
        lambda x, group, world: funcol.all_reduce(x, "sum", group),
    ),
    "all_reduce_coalesced": (
        lambda x, group, world: ops.all_reduce_coalesced([x, x[:1]], "MAX", group),
        lambda x, group, world: funcol.all_reduce_coalesced([x, x[:1]], "max", group),
    ),
    "all_gather_into_tensor": (
        lambda x, group, world: ops.all_gather_into_tensor(x, world, group),
        lambda x, group, world: funcol.all_gather_tensor(x, 0, group),
    ),
    "all_gather_into_tensor_coalesced": (
        lambda x, group, world: ops.all_gather_into_tensor_coalesced([x, x[:1]], world, group),
        lambda x, group, world: funcol.all_gather_into_tensor_coalesced([x, x[:1]], group),
    ),
    "reduce_scatter_tensor": (
        lambda x, group, world: ops.reduce_scatter_tensor(x, "avg", world, group),
        lambda x, group, world: funcol.reduce_scatter_tensor(x, "avg", 0, group),
    ),
    "reduce_scatter_tensor_coalesced": (
        lambda x, group, world: ops.reduce_scatter_tensor_coalesced([x, x + 1], "sum", world, group),
        lambda x, group, world: funcol.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group),
    ),
    "all_to_all_single": (
        lambda x, group, world: ops.all_to_all_single(
            x, [len(x) // world] * world, [len(x) // world] * world, group
        ),
        lambda x, group, world: funcol.all_to_all_single(x, None, None, group),
    ),
    "broadcast": (
        lambda x, group, world: ops.broadcast(x, world - 1, group),
        lambda x, group, world: funcol.broadcast(x, world - 1, group),
    ),
}

GROUPS = {"name": name, "object": world_group}


@each_world
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("group", GROUPS)
@on_ranks()
def test_each_op_agrees_with_its_function(rank: int, world: int, call: str, group: str) -> None:
    op, function = CALLS[call]
    assert_same(op(x_of(rank), GROUPS[group](), world), function(x_of(rank), world_group(), world))


# Arguments after the tensor, the group left out.
ARGUMENTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "all_reduce": lambda world: ("sum",),
    "all_gather_into_tensor": lambda world: (world,),
    "reduce_scatter_tensor": lambda world: ("avg", world),
    "all_to_all_single": lambda world: ([PROGRAM_SHAPE[0] // world] * world,) * 2,
    "broadcast": lambda world: (world - 1,),
}


@pytest.mark.parametrize("call", ARGUMENTS)
@on_ranks(2)
def test_the_kernel_for_any_other_device_runs_on_its_backend(rank: int, world: int, call: str) -> None:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    op = getattr(ops, call).default
    result = op.redispatch(keys, x_of(rank), *ARGUMENTS[call](world), name())
    assert funcol.is_pending(result)
    assert_same(result, CALLS[call][1](x_of(rank), world_group(), world))


@from_2_15
@pytest.mark.parametrize("form", ["enum", "object"])
@pytest.mark.parametrize(
    "call", ["all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_"]
)
@on_ranks(2)
def test_an_op_takes_a_reduce_op_object(rank: int, world: int, call: str, form: str) -> None:
    reduce_op = {"enum": dist.ReduceOp.MAX, "object": dist.ReduceOp(dist.ReduceOp.MAX)}[form]
    x = x_of(rank)
    calls = {
        "all_reduce": lambda op: ops.all_reduce(x, op, name()),
        "all_reduce_": lambda op: funcol.wait_tensor(ops.all_reduce_(x.clone(), op, name())),
        "all_reduce_coalesced": lambda op: ops.all_reduce_coalesced([x, x[:1]], op, name()),
        "all_reduce_coalesced_": lambda op: funcol.wait_tensors(
            ops.all_reduce_coalesced_([x.clone(), x[:1].clone()], op, name())
        ),
    }
    assert_same(calls[call](reduce_op), calls[call]("max"))


@pytest.mark.parametrize("call", CALLS)
@on_ranks(2)
def test_an_op_that_makes_its_result_gives_a_pending_one(rank: int, world: int, call: str) -> None:
    results = CALLS[call][0](x_of(rank), name(), world)
    results = [results] if isinstance(results, Tensor) else results
    assert all(map(funcol.is_pending, results))
    funcol.wait_tensors(results)


# In-place and out forms


IN_PLACE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "all_reduce_": (
        lambda x: ops.all_reduce_(x, "sum", name()),
        lambda x: funcol.all_reduce(x, "sum", world_group()),
    ),
    "broadcast_": (
        lambda x: ops.broadcast_(x, 0, name()),
        lambda x: funcol.broadcast(x, 0, world_group()),
    ),
}


@each_world
@pytest.mark.parametrize("op", IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
@on_ranks()
def test_an_in_place_op_writes_and_returns_its_input(
    rank: int, world: int, op: str, dtype: torch.dtype
) -> None:
    in_place, function = IN_PLACE[op]
    x = sample(rank, (5, 3), dtype)
    expected = funcol.wait_tensor(function(x))
    address = x.data_ptr()
    result = in_place(x)
    assert result is x
    assert not funcol.is_pending(x)
    assert ops.wait_tensor(result) is x
    assert x.data_ptr() == address
    assert_same(x, expected)


@each_world
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
@on_ranks()
def test_the_coalesced_in_place_op_writes_and_returns_its_inputs(
    rank: int, world: int, dtype: torch.dtype
) -> None:
    inputs = [sample(rank, shape, dtype) for shape in ((5, 3), (4,), (0, 2))]
    expected = funcol.wait_tensors(funcol.all_reduce_coalesced(inputs, "sum", world_group()))
    results = ops.all_reduce_coalesced_(inputs, "sum", name())
    assert all(result is x for result, x in zip(results, inputs, strict=True))
    waited = ops.wait_tensors(results)
    assert all(result is x for result, x in zip(waited, inputs, strict=True))
    assert_same(inputs, expected)


OUT: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "all_gather_into_tensor_out": (
        lambda x, world, out: ops.all_gather_into_tensor_out(x, world, name(), out=out),
        lambda x, world: funcol.all_gather_tensor(x, 0, world_group()),
        lambda x, world: x.new_empty(world * x.size(0), x.size(1)),
    ),
    "reduce_scatter_tensor_out": (
        lambda x, world, out: ops.reduce_scatter_tensor_out(x, "sum", world, name(), out=out),
        lambda x, world: funcol.reduce_scatter_tensor(x, "sum", 0, world_group()),
        lambda x, world: x.new_empty(x.size(0) // world, x.size(1)),
    ),
}


@each_world
@pytest.mark.parametrize("op", OUT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64, torch.bool], ids=str)
@on_ranks()
def test_an_op_with_out_writes_and_returns_it(rank: int, world: int, op: str, dtype: torch.dtype) -> None:
    with_out, function, make_out = OUT[op]
    x = sample(rank, PROGRAM_SHAPE, dtype)
    out = make_out(x, world)
    address = out.data_ptr()
    result = with_out(x, world, out)
    assert result is out
    assert ops.wait_tensor(result) is out
    assert out.data_ptr() == address
    assert_same(out, funcol.wait_tensor(function(x, world)))


@pytest.mark.parametrize("op", IN_PLACE)
@on_ranks(2)
def test_an_in_place_op_takes_a_pending_tensor(rank: int, world: int, op: str) -> None:
    in_place, function = IN_PLACE[op]
    x = sample(rank, (5, 3))
    reduced = funcol.wait_tensor(funcol.all_reduce(x, "sum", world_group())).clone()
    pending = funcol.all_reduce(x, "sum", world_group())
    result = in_place(pending)
    assert result is pending
    assert_same(funcol.wait_tensor(result), funcol.wait_tensor(function(reduced)))


# Waiting


@pytest.mark.parametrize(
    "call",
    ["all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"],
)
@on_ranks(2)
def test_one_work_that_covers_several_outputs_is_waited_for_once(rank: int, world: int, call: str) -> None:
    waits_before, _ = funcol._C.async_counters()
    results = CALLS[call][0](x_of(rank), name(), world)
    for result in results:
        funcol.wait_tensor(result)
        result.sum()
    waits, _ = funcol._C.async_counters()
    assert waits - waits_before == 1


@on_ranks(2)
def test_waiting_for_one_output_of_a_work_settles_the_others(rank: int, world: int) -> None:
    first, second = funcol.all_reduce_coalesced([torch.ones(2), torch.ones(3)], "sum", world_group())
    assert funcol.is_pending(second)
    funcol.wait_tensor(first)
    assert not funcol.is_pending(second)
    assert second.tolist() == [world] * 3


@each_world
@pytest.mark.parametrize("wait", ["function", "op", "core"])
@on_ranks()
def test_wait_tensors_waits_for_results_of_any_origin(rank: int, world: int, wait: str) -> None:
    wait_tensors = {"function": funcol.wait_tensors, "op": ops.wait_tensors, "core": core.wait_tensors}[wait]
    x = torch.full((3,), float(rank + 1))
    tensors = [
        funcol.all_reduce(x, "sum", world_group()),
        core.all_reduce(x, "sum", name()),
        x.clone(),
        ops.all_reduce_(x.clone(), "sum", name()),
    ]
    waited = wait_tensors(tensors)
    assert len(waited) == len(tensors)
    assert not any(map(funcol.is_pending, waited))
    total = float(sum(range(1, world + 1)))
    assert [one.tolist() for one in waited] == [[total] * 3, [total] * 3, x.tolist(), [total] * 3]


@pytest.mark.parametrize("wait", ["function", "op", "core"])
@on_ranks(2)
def test_wait_tensor_waits_for_a_result_of_any_origin(rank: int, world: int, wait: str) -> None:
    wait_tensor = {"function": funcol.wait_tensor, "op": ops.wait_tensor, "core": core.wait_tensor}[wait]
    x = torch.full((3,), float(rank + 1))
    total = [float(sum(range(1, world + 1)))] * 3
    assert wait_tensor(funcol.all_reduce(x, "sum", world_group())).tolist() == total
    assert wait_tensor(core.all_reduce(x, "sum", name())).tolist() == total
    assert wait_tensor(x).tolist() == x.tolist()


@on_ranks(1)
def test_wait_tensor_returns_the_tensor_that_it_was_given(rank: int, world: int) -> None:
    pending = funcol.all_reduce(torch.ones(2), "sum", world_group())
    assert ops.wait_tensor(pending) is pending
    assert funcol.wait_tensor(pending) is pending
