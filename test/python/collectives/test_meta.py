"""The operators on tensors without data: Meta kernels, symbolic sizes, what tracing sees."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from differential import LAYOUTS, sample, world_group
from graphs import targets_in
from metas import listed, metadata, symbolic_meta_input
from ranks import on_ranks, run_ranks
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import funcol

ops = torch.ops.funcol

WORLD = 2


# Each op that makes its result: OPS[name](x, group name), for x whose dim 0 is a multiple of WORLD.
OPS: dict[str, Callable[[Tensor, str], Any]] = {
    "all_reduce": lambda x, group: ops.all_reduce(x, "sum", group),
    "all_reduce_coalesced": lambda x, group: ops.all_reduce_coalesced([x, x + x], "sum", group),
    "all_gather_into_tensor": lambda x, group: ops.all_gather_into_tensor(x, WORLD, group),
    "all_gather_into_tensor_coalesced": lambda x, group: ops.all_gather_into_tensor_coalesced(
        [x, x + x], WORLD, group
    ),
    "reduce_scatter_tensor": lambda x, group: ops.reduce_scatter_tensor(x, "sum", WORLD, group),
    "reduce_scatter_tensor_coalesced": lambda x, group: ops.reduce_scatter_tensor_coalesced(
        [x, x + x], "sum", WORLD, group
    ),
    "all_to_all_single": lambda x, group: ops.all_to_all_single(
        x, [x.size(0) // WORLD] * WORLD, [x.size(0) // WORLD] * WORLD, group
    ),
    "broadcast": lambda x, group: ops.broadcast(x, 0, group),
}

each_op = pytest.mark.parametrize("op", OPS)


def meta_agrees_with_real(
    rank: int, world: int, op: str, layout: str, dtype: torch.dtype, fake: bool
) -> None:
    x = LAYOUTS[layout](rank, (4, 3, 2), dtype)
    name = world_group().group_name
    real = [metadata(tensor) for tensor in listed(OPS[op](x, name))]
    if fake:
        with FakeTensorMode() as mode:
            without_data = listed(OPS[op](mode.from_tensor(x), name))
    else:
        without_data = listed(OPS[op](x.to("meta"), name))
    assert [metadata(tensor) for tensor in without_data] == real


@each_op
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("offset", torch.float32),
        ("transposed", torch.float32),
        ("strided", torch.bool),
        ("conjugated", torch.complex64),
    ],
    ids=str,
)
def test_a_meta_kernel_says_what_the_real_one_gives(op: str, layout: str, dtype: torch.dtype) -> None:
    run_ranks(meta_agrees_with_real, WORLD, op, layout, dtype, False)


@each_op
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64], ids=str)
def test_a_fake_tensor_sees_what_the_real_op_gives(op: str, dtype: torch.dtype) -> None:
    run_ranks(meta_agrees_with_real, WORLD, op, "offset", dtype, True)


@on_ranks(1)
def test_the_meta_kernel_gathers_a_0_dim_tensor_as_a_1_dim_one(rank: int, world: int) -> None:
    result = ops.all_gather_into_tensor(torch.tensor(1.0, device="meta"), WORLD, "any")
    assert result.shape == (WORLD,)


@pytest.mark.parametrize("op", ["all_reduce_", "broadcast_"])
def test_a_meta_kernel_of_an_in_place_op_returns_its_input(op: str) -> None:
    x = torch.empty(4, 3, device="meta")
    calls = {
        "all_reduce_": lambda: ops.all_reduce_(x, "sum", "any"),
        "broadcast_": lambda: ops.broadcast_(x, 0, "any"),
    }
    assert calls[op]() is x


@pytest.mark.parametrize("op", ["all_gather_into_tensor_out", "reduce_scatter_tensor_out"])
def test_a_meta_kernel_of_an_out_form_returns_out(op: str) -> None:
    x = torch.empty(4, 3, device="meta")
    out = torch.empty(8 if op.startswith("all_gather") else 2, 3, device="meta")
    calls = {
        "all_gather_into_tensor_out": lambda: ops.all_gather_into_tensor_out(x, WORLD, "any", out=out),
        "reduce_scatter_tensor_out": lambda: ops.reduce_scatter_tensor_out(x, "sum", WORLD, "any", out=out),
    }
    assert calls[op]() is out


def test_meta_kernels_of_point_to_point_ops_give_their_shapes() -> None:
    x = torch.empty(4, 3, dtype=torch.int32, device="meta")
    sent, received = ops.batch_p2p_ops(["isend", "irecv"], [1, 1], [0, 0], [x, x], "any")
    results = [ops.isend(x, 1, 0, "any"), ops.irecv(x, 1, 0, "any"), sent, received]
    assert [tuple(result.shape) for result in results] == [(0,), (4, 3), (0,), (4, 3)]
    assert {result.dtype for result in results} == {torch.int32}


@pytest.mark.parametrize("namespace", ["funcol", "_c10d_functional"])
def test_meta_kernels_of_waiting_keep_the_shapes(namespace: str) -> None:
    space = getattr(torch.ops, namespace)
    x, y = torch.empty(4, 3, device="meta"), torch.empty(2, device="meta")
    assert space.wait_tensor(x).shape == x.shape
    assert [result.shape for result in space.wait_tensors([x, y])] == [x.shape, y.shape]


SYMBOLIC_SHAPES: dict[str, Callable[[Any, Any], list[tuple[Any, Any]]]] = {
    "all_reduce": lambda rows, columns: [(rows, columns)],
    "all_reduce_coalesced": lambda rows, columns: [(rows, columns)] * 2,
    "all_gather_into_tensor": lambda rows, columns: [(WORLD * rows, columns)],
    "all_gather_into_tensor_coalesced": lambda rows, columns: [(WORLD * rows, columns)] * 2,
    "reduce_scatter_tensor": lambda rows, columns: [(rows // WORLD, columns)],
    "reduce_scatter_tensor_coalesced": lambda rows, columns: [(rows // WORLD, columns)] * 2,
    "all_to_all_single": lambda rows, columns: [(WORLD * (rows // WORLD), columns)],
    "broadcast": lambda rows, columns: [(rows, columns)],
}


@each_op
def test_a_meta_kernel_keeps_symbolic_sizes(op: str) -> None:
    x, rows, columns = symbolic_meta_input()
    results = listed(OPS[op](x, "any"))
    actual = [tuple(str(size) for size in result.shape) for result in results]
    assert actual == [tuple(str(size) for size in shape) for shape in SYMBOLIC_SHAPES[op](rows, columns)]


def traces_to_core(rank: int, world: int, op: str, mode: str) -> list[str]:
    name = world_group().group_name
    x = sample(rank, (4, 6))

    def program(x: Tensor) -> list[Tensor]:
        return [result + 1 for result in listed(OPS[op](x, name))]

    graph = make_fx(program, tracing_mode=mode)(x)
    for actual, expected in zip(graph(x), program(x), strict=True):
        assert torch.equal(actual, expected)
    return targets_in(graph)


@each_op
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_op_becomes_the_core_op_and_a_wait(op: str, mode: str) -> None:
    for targets in run_ranks(traces_to_core, WORLD, op, mode):
        assert f"_c10d_functional.{op}.default" in targets
        assert any(target.startswith("_c10d_functional.wait_tensor") for target in targets)
        assert not any(target.startswith("funcol.") for target in targets)


@each_op
@on_ranks(WORLD)
def test_a_graph_traced_with_symbolic_sizes_serves_other_sizes(rank: int, world: int, op: str) -> None:
    name = world_group().group_name
    graph = make_fx(lambda x: listed(OPS[op](x, name)), tracing_mode="symbolic")(sample(rank, (4, 6)))
    other = sample(rank, (8, 5))
    for actual, expected in zip(graph(other), listed(OPS[op](other, name)), strict=True):
        assert torch.equal(actual, expected)


OPCHECKED: dict[str, Callable[[str], tuple[Any, ...]]] = {
    "all_reduce": lambda group: (torch.randn(4, 3), "sum", group),
    "all_gather_into_tensor": lambda group: (torch.randn(4, 3), 1, group),
    "reduce_scatter_tensor": lambda group: (torch.randn(4, 3), "sum", 1, group),
    "all_to_all_single": lambda group: (torch.randn(4, 3), [4], [4], group),
    "broadcast": lambda group: (torch.randn(4, 3), 0, group),
    "wait_tensor": lambda group: (torch.randn(4, 3),),
}


@pytest.mark.parametrize("op", OPCHECKED)
# Its other two checks stumble over PyTorch's own wait_tensor, whose schema hides that it returns its input.
@pytest.mark.parametrize("check", ["test_autograd_registration", "test_aot_dispatch_dynamic"])
@on_ranks(1)
def test_an_op_passes_the_checks_of_pytorch(rank: int, world: int, op: str, check: str) -> None:
    arguments = OPCHECKED[op](world_group().group_name)
    torch.library.opcheck(getattr(ops, op).default, arguments, test_utils=check)


# Collectives whose results' shapes do not depend on the size of the group.
SHAPES_ALONE: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: funcol.all_reduce(x, "sum", "nowhere"),
    "all_reduce_coalesced": lambda x: funcol.all_reduce_coalesced([x], "sum", "nowhere")[0],
    "all_reduce_inplace": lambda x: funcol.all_reduce_inplace(x, "sum", "nowhere"),
    "broadcast": lambda x: funcol.broadcast(x, 0, "nowhere"),
    "all_to_all_single": lambda x: funcol.all_to_all_single(x, [3, 1], [2, 2], "nowhere"),
}

SIZES_OF_GROUPS: dict[str, Callable[[Tensor], Any]] = {
    "all_gather_tensor": lambda x: funcol.all_gather_tensor(x, 0, "nowhere"),
    "all_gather_into_tensor_coalesced": lambda x: funcol.all_gather_into_tensor_coalesced([x], "nowhere"),
    "reduce_scatter_tensor": lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, "nowhere"),
    "reduce_scatter_tensor_coalesced": lambda x: funcol.reduce_scatter_tensor_coalesced(
        [x], "sum", [0], "nowhere"
    ),
    "all_to_all_single": lambda x: funcol.all_to_all_single(x, None, None, "nowhere"),
    "permute_tensor": lambda x: funcol.permute_tensor(x, [1, 0], "nowhere"),
}


def without_data(is_fake: bool) -> Tensor:
    x = torch.ones(4, 3)
    return FakeTensorMode().from_tensor(x) if is_fake else x.to("meta")


either = pytest.mark.parametrize("is_fake", [False, True], ids=["meta", "fake"])
either_way = pytest.mark.parametrize("is_installed", [False, True], ids=["own", "installed"])


@pytest.mark.parametrize("op", SHAPES_ALONE)
@either
@either_way
def test_shape_is_known_without_the_group(op: str, is_fake: bool, is_installed: bool) -> None:
    x = without_data(is_fake)
    with funcol.installed() if is_installed else nullcontext():
        result = SHAPES_ALONE[op](x)
    assert (result.shape, result.device, result.dtype) == (x.shape, x.device, x.dtype)


@pytest.mark.parametrize("op", SIZES_OF_GROUPS)
@either
def test_shape_that_needs_the_size_of_an_unknown_group_is_refused(op: str, is_fake: bool) -> None:
    with pytest.raises(ValueError, match=f"funcol::{op}: no process group is registered under the name"):
        SIZES_OF_GROUPS[op](without_data(is_fake))


@pytest.mark.parametrize("op", SHAPES_ALONE)
def test_data_needs_the_group(op: str) -> None:
    with pytest.raises(ValueError, match=r"no process group (is registered under the name 'nowhere'|yet)"):
        SHAPES_ALONE[op](torch.ones(4, 3))
