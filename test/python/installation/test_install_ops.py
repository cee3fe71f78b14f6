"""PyTorch's operators with funcol's kernels under them: values, gradients and graphs as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
import torch.testing._internal.distributed.fake_pg
from differential import WORLDS, sample, world_group
from ranks import on_ranks, run_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import funcol
from funcol import _C

ON_DEVICES = True

core = torch.ops._c10d_functional
with_autograd = torch.ops._c10d_functional_autograd
legacy = torch.ops.c10d_functional
Call = Callable[[Tensor, int, str], Any]

# CALLS[name](x, number of ranks, group name)
CORE: dict[str, Call] = {
    "all_reduce": lambda x, size, group: core.all_reduce(x, "sum", group),
    "all_reduce_max": lambda x, size, group: core.all_reduce(x, "max", group),
    "all_reduce_": lambda x, size, group: core.all_reduce_(x.clone(), "avg", group),
    "all_reduce_coalesced": lambda x, size, group: core.all_reduce_coalesced([x, x[:1] + 1], "sum", group),
    "all_reduce_coalesced_": lambda x, size, group: core.all_reduce_coalesced_(
        [x.clone(), x[:1] + 1], "min", group
    ),
    "all_gather_into_tensor": lambda x, size, group: core.all_gather_into_tensor(x, size, group),
    "all_gather_into_tensor_out": lambda x, size, group: core.all_gather_into_tensor_out(
        x.detach(), size, group, out=x.new_empty(size * x.shape[0], x.shape[1])
    ),
    "all_gather_into_tensor_coalesced": lambda x, size, group: core.all_gather_into_tensor_coalesced(
        [x, x[:1] + 1], size, group
    ),
    "reduce_scatter_tensor": lambda x, size, group: core.reduce_scatter_tensor(x, "sum", size, group),
    "reduce_scatter_tensor_out": lambda x, size, group: core.reduce_scatter_tensor_out(
        x.detach(), "sum", size, group, out=x.new_empty(x.shape[0] // size, x.shape[1])
    ),
    "reduce_scatter_tensor_coalesced": lambda x, size, group: core.reduce_scatter_tensor_coalesced(
        [x, x + 1], "sum", size, group
    ),
    "all_to_all_single": lambda x, size, group: core.all_to_all_single(
        x, [x.shape[0] // size] * size, [x.shape[0] // size] * size, group
    ),
    "broadcast": lambda x, size, group: core.broadcast(x.detach(), size - 1, group),
    "broadcast_": lambda x, size, group: core.broadcast_(x.detach().clone(), 0, group),
}
WITH_AUTOGRAD: dict[str, Call] = {
    "autograd_all_gather_into_tensor": lambda x, size, group: with_autograd.all_gather_into_tensor(
        x, size, group
    ),
    "autograd_reduce_scatter_tensor": lambda x, size, group: with_autograd.reduce_scatter_tensor(
        x, "sum", size, group
    ),
    "autograd_all_to_all_single": lambda x, size, group: with_autograd.all_to_all_single(
        x, [x.shape[0] // size] * size, [x.shape[0] // size] * size, group
    ),
}
LEGACY: dict[str, Call] = {
    "legacy_broadcast": lambda x, size, group: legacy.broadcast(x.detach(), size - 1, *everyone(size)),
    "legacy_all_reduce": lambda x, size, group: legacy.all_reduce(x, "sum", *everyone(size)),
    "legacy_all_reduce_coalesced": lambda x, size, group: legacy.all_reduce_coalesced(
        [x, x[:1] + 1], "max", *everyone(size)
    ),
    "legacy_all_gather_into_tensor": lambda x, size, group: legacy.all_gather_into_tensor(x, *everyone(size)),
    "legacy_all_gather_into_tensor_coalesced": lambda x, size, group: legacy.all_gather_into_tensor_coalesced(
        [x, x[:1] + 1], *everyone(size)
    ),
    "legacy_reduce_scatter_tensor": lambda x, size, group: legacy.reduce_scatter_tensor(
        x, "sum", *everyone(size)
    ),
    "legacy_reduce_scatter_tensor_coalesced": lambda x, size, group: legacy.reduce_scatter_tensor_coalesced(
        [x, x + 1], "sum", *everyone(size)
    ),
    "legacy_all_to_all_single": lambda x, size, group: legacy.all_to_all_single(
        x, None, None, *everyone(size)
    ),
    "legacy_all_to_all_single_with_splits": lambda x, size, group: legacy.all_to_all_single(
        x, [x.shape[0] // size] * size, [x.shape[0] // size] * size, *everyone(size)
    ),
}
CALLS = {**CORE, **WITH_AUTOGRAD, **LEGACY}
DIFFERENTIABLE = [
    *["all_reduce", "all_reduce_coalesced", "all_gather_into_tensor", "all_gather_into_tensor_coalesced"],
    *["reduce_scatter_tensor", "all_to_all_single", *WITH_AUTOGRAD, "legacy_all_reduce"],
    *["legacy_all_gather_into_tensor", "legacy_all_gather_into_tensor_coalesced"],
    *["legacy_reduce_scatter_tensor", "legacy_all_to_all_single"],
]
SHAPE = (12, 5)  # dim 0 is divisible by every number of ranks in use


def everyone(size: int) -> tuple[str, list[int], int]:
    return "", list(range(size)), size


def waited(result: Any, wait: Callable[[Tensor], Tensor] = core.wait_tensor) -> list[Tensor]:
    return [wait(tensor) for tensor in (result if isinstance(result, list) else [result])]


def run(call: str, x: Tensor, size: int) -> list[Tensor]:
    return waited(CALLS[call](x, size, world_group().group_name))


def assert_all_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert [type(one) for one in actual] == [type(one) for one in expected]
    assert [one.stride() for one in actual] == [one.stride() for one in expected]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# Values


def gives_the_same_values(rank: int, world: int, call: str) -> None:
    x = sample(rank, SHAPE)
    expected = run(call, x, world)
    with funcol.installed():
        actual = run(call, x, world)
    assert_all_equal(actual, expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("call", CALLS)
def test_an_operator_gives_the_same_values(call: str, world: int) -> None:
    run_ranks(gives_the_same_values, world, call)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("call", DIFFERENTIABLE)
@on_ranks()
def test_an_operator_gives_the_same_gradients(rank: int, world: int, call: str) -> None:
    def gradient(context: Any) -> Tensor:
        x = sample(rank, SHAPE).requires_grad_()
        with context:
            outputs = run(call, x, world)
            loss = sum((output * sample(rank + 10, output.shape)).sum() for output in outputs)
            assert isinstance(loss, Tensor)
            (gradient,) = torch.autograd.grad(loss, x)
        return gradient

    assert_all_equal([gradient(funcol.installed())], [gradient(nullcontext())])


# PyTorch's kernel cannot be compared with: with gloo its results are written to once more while it waits.
@pytest.mark.parametrize(
    "coalesced", ["reduce_scatter_tensor_coalesced", "legacy_reduce_scatter_tensor_coalesced"]
)
@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_coalesced_scatters_have_the_gradients_of_single_ones(rank: int, world: int, coalesced: str) -> None:
    x = sample(rank, SHAPE).requires_grad_()
    group = world_group().group_name
    with funcol.installed():
        results = run(coalesced, x, world)
        singly = [core.wait_tensor(core.reduce_scatter_tensor(y, "sum", world, group)) for y in (x, x + 1)]
    (actual,) = torch.autograd.grad(results[0].square().sum() + results[1].sum(), x)
    (expected,) = torch.autograd.grad(singly[0].square().sum() + singly[1].sum(), x)
    assert_all_equal([actual], [expected])


@pytest.mark.parametrize("call", [*CORE, *LEGACY])
@on_ranks(2)
def test_an_operator_gives_the_same_values_in_inference_mode(rank: int, world: int, call: str) -> None:
    with torch.inference_mode():
        gives_the_same_values(rank, world, call)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [[2, 1], [4, 0], [2, 7]])
@pytest.mark.parametrize(
    "call", ["all_reduce", "all_gather_into_tensor", "all_to_all_single", "legacy_all_gather_into_tensor"]
)
@on_ranks(2)
def test_other_sizes_and_dtypes_give_the_same_values(
    rank: int, world: int, call: str, shape: list[int], dtype: torch.dtype
) -> None:
    x = sample(rank, shape, dtype)
    expected = run(call, x, world)
    with funcol.installed():
        assert_all_equal(run(call, x, world), expected)


@on_ranks(2)
def test_the_legacy_operator_waits(rank: int, world: int) -> None:
    with funcol.installed():
        (reduced,) = waited(legacy.all_reduce(torch.ones(3), "sum", *everyone(world)), legacy.wait_tensor)
    assert reduced.tolist() == [float(world)] * 3


@on_ranks(2)
def test_a_list_is_waited_for(rank: int, world: int) -> None:
    with funcol.installed():
        results = core.all_reduce_coalesced([torch.ones(3), torch.ones(0)], "sum", world_group().group_name)
        assert [tensor.tolist() for tensor in core.wait_tensors(results)] == [[float(world)] * 3, []]


@pytest.mark.parametrize("namespace", ["_c10d_functional", "c10d_functional"])
@on_ranks(2)
def test_ranks_exchange_tensors(rank: int, world: int, namespace: str) -> None:
    ops, group, peer = getattr(torch.ops, namespace), world_group().group_name, 1 - rank
    with funcol.installed():
        if rank == 0:
            sent = ops.isend(torch.tensor([5.0]), peer, 0, group)
            core.wait_tensor(sent)
        else:
            received = ops.irecv(torch.zeros(1), peer, 0, group)
            assert core.wait_tensor(received).item() == 5.0
        _, received = ops.batch_p2p_ops(
            ["isend", "irecv"], [peer, peer], [1, 1], [torch.tensor([float(rank)]), torch.zeros(1)], group
        )
        assert core.wait_tensor(received).item() == float(peer)


def c10d_group(rank: int, ranks: list[int], tag: str) -> Any:
    return dist.distributed_c10d._new_group_with_tag(ranks, pg_tag=tag)


@on_ranks(3)
def test_a_legacy_operator_finds_a_group_by_ranks_and_tag(rank: int, world: int) -> None:
    group = c10d_group(rank, [0, 2], "evens")
    if rank == 1:
        return
    assert group is not None
    with funcol.installed():
        reduced = [
            core.wait_tensor(legacy.all_reduce(torch.tensor([float(rank)]), "sum", "evens", [0, 2], 2))
            for _ in range(2)
        ]
    assert [tensor.item() for tensor in reduced] == [2.0, 2.0]


@on_ranks(2)
def test_a_destroyed_group_is_not_found_by_its_ranks(rank: int, world: int) -> None:
    with funcol.installed():
        for _ in range(2):
            group = c10d_group(rank, [0, 1], "short-lived")
            core.wait_tensor(legacy.all_reduce(torch.ones(1), "sum", "short-lived", [0, 1], 2))
            dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="no process group has the ranks"):
            legacy.all_reduce(torch.ones(1), "sum", "short-lived", [0, 1], 2)


# PyTorch's registry of works


@on_ranks(2)
def test_a_work_is_in_pytorchs_registry_until_it_was_waited_for(rank: int, world: int) -> None:
    size = torch._C._distributed_c10d._get_work_registry_size
    group = world_group().group_name
    before = size()
    with funcol.installed():
        reduced = core.all_reduce(torch.ones(3), "sum", group)
        assert not funcol.is_pending(reduced)
        assert size() == before + 1
        core.wait_tensor(reduced)
        assert size() == before


@on_ranks(2)
def test_a_work_that_c10d_registered_is_waited_for(rank: int, world: int) -> None:
    x = torch.full((3,), float(rank))
    with funcol.installed(), stock.allow_inflight_collective_as_graph_input_ctx():
        dist.all_reduce(x, async_op=True)
        legacy.wait_tensor(x)
    assert x.tolist() == [float(sum(range(world)))] * 3


@pytest.mark.parametrize("call", [*CORE, *LEGACY])
@on_ranks(2)
def test_an_operator_takes_a_pending_input(rank: int, world: int, call: str) -> None:
    x = sample(rank, SHAPE)
    group = world_group()
    expected = run(call, funcol.all_reduce(x, "sum", group) + 0, world)
    with funcol.installed():
        assert_all_equal(run(call, funcol.all_reduce(x, "sum", group), world), expected)


# Errors


@pytest.fixture
def installed_alone() -> Iterator[str]:
    """Yields the name of a fake group of four ranks, with funcol installed."""
    dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
    with funcol.installed():
        yield world_group().group_name
    dist.destroy_process_group()


ERRORS: dict[str, tuple[Call, str]] = {
    "group size": (lambda x, size, group: core.all_gather_into_tensor(x, 3, group), "group_size is 3"),
    "name of the group": (lambda x, size, group: core.all_reduce(x, "sum", "nobody"), "'nobody'"),
    "reduce op": (lambda x, size, group: core.all_reduce(x, "mean", group), "unknown reduce op 'mean'"),
    "rows": (
        lambda x, size, group: core.reduce_scatter_tensor(x[:3], "sum", size, group),
        "not divisible by the 4 ranks",
    ),
    "source": (lambda x, size, group: core.broadcast(x, 4, group), "4"),
    "ranks": (
        lambda x, size, group: legacy.all_reduce(x, "sum", "", [0, 7, 2, 3], size),
        r"no process group has the ranks \[0, 7, 2, 3\] and the tag ''",
    ),
    "tag": (
        lambda x, size, group: legacy.all_reduce(x, "sum", "gone", [0, 1, 2, 3], size),
        "the tag 'gone'",
    ),
    "one of the splits": (
        lambda x, size, group: legacy.all_to_all_single(x, None, [3] * size, *everyone(size)),
        "both output_split_sizes and input_split_sizes",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_a_wrong_argument_is_refused_before_anything_is_sent(
    installed_alone: str, call: Call, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(SHAPE), 4, installed_alone)


# Tracing: as without


@pytest.fixture
def four_ranks() -> Iterator[str]:
    dist.init_process_group("fake", rank=0, world_size=4, store=dist.HashStore())
    yield world_group().group_name
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("call", [*CORE, *LEGACY])
def test_the_graph_of_an_operator_is_the_same(four_ranks: str, call: str, mode: str) -> None:
    def trace() -> str:
        traced = make_fx(lambda x: waited(CALLS[call](x, 4, four_ranks)), tracing_mode=mode)(
            torch.ones(SHAPE)
        )
        return traced.print_readable(print_output=False)

    expected = trace()
    with funcol.installed():
        assert trace() == expected


@pytest.mark.parametrize("call", [*CORE, *LEGACY])
def test_an_operator_on_fake_tensors_gives_the_same_shapes(four_ranks: str, call: str) -> None:
    def outputs() -> list[tuple[type, torch.Size, torch.device]]:
        with FakeTensorMode():
            results = waited(CALLS[call](torch.ones(SHAPE), 4, four_ranks))
        return [(type(result), result.shape, result.device) for result in results]

    expected = outputs()
    with funcol.installed():
        assert outputs() == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("call", [*CORE, *LEGACY])
def test_dynamo_captures_an_operator_the_same(four_ranks: str, call: str) -> None:
    def captured() -> list[str]:
        codes: list[str] = []

        def record(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            codes.append(graph.code)
            return graph.forward

        torch._dynamo.reset()
        torch.compile(lambda x: waited(CALLS[call](x, 4, four_ranks)), backend=record, fullgraph=True)(
            torch.ones(SHAPE)
        )
        return codes

    expected = captured()
    with funcol.installed():
        assert captured() == expected


# The operators that only newer releases have


@pytest.mark.parametrize(
    "op", [op for op in _C.ops_with_core_kernels() if op.startswith("c10d_functional::")]
)
def test_each_legacy_operator_exists_and_traces_in_every_minor(op: str) -> None:
    packet = getattr(legacy, op.split("::")[1])
    assert packet.overloads() == ["default"]
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op, "CompositeImplicitAutograd")
