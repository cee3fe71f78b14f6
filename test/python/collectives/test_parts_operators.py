"""The operators of the uneven and rooted collectives: results, shapes, traces and opcheck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from differential import LAYOUTS, assert_plain, sample, world_group
from graphs import check_graph
from metas import listed, metadata, symbolic_meta_input
from ranks import on_ranks, run_ranks
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import funcol

ON_DEVICES = True

ops = torch.ops.funcol


def name_of_world() -> str:
    return world_group().group_name


# Each op with split sizes for two ranks, for x of shape (4, 6), and the function that does the same.
OPS: dict[str, tuple[Callable[[Tensor, Any], Any], Callable[[Tensor, Any], Any]]] = {
    "all_gather_along_dim": (
        lambda x, group: ops.all_gather_along_dim(x, 1, group, [6, 6]),
        lambda x, group: funcol.all_gather_tensor(x, 1, group, split_sizes=[6, 6]),
    ),
    "all_gather_along_dim, no sizes": (
        lambda x, group: ops.all_gather_along_dim(x, -1, group),
        lambda x, group: funcol.all_gather_tensor(x, -1, group),
    ),
    "reduce_scatter_along_dim": (
        lambda x, group: ops.reduce_scatter_along_dim(x, "max", 1, group, [5, 1]),
        lambda x, group: funcol.reduce_scatter_tensor(x, "max", 1, group, split_sizes=[5, 1]),
    ),
    "reduce_scatter_along_dim, no sizes": (
        lambda x, group: ops.reduce_scatter_along_dim(x, "avg", -1, group),
        lambda x, group: funcol.reduce_scatter_tensor(x, "avg", -1, group),
    ),
    "reduce_scatter_along_dims_coalesced": (
        lambda x, group: ops.reduce_scatter_along_dims_coalesced([x, x + 1], "sum", [0, -1], group),
        lambda x, group: funcol.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, -1], group),
    ),
    "all_to_all": (
        lambda x, group: ops.all_to_all([x[:1], x[1:]], [[1, 1], [3, 3]][world_group().rank()], group),
        lambda x, group: funcol.all_to_all([x[:1], x[1:]], [[1, 1], [3, 3]][world_group().rank()], group),
    ),
    "all_to_all, no sizes": (
        lambda x, group: ops.all_to_all([x, x + 1], [], group),
        lambda x, group: funcol.all_to_all([x, x + 1], None, group),
    ),
    "permute_tensor": (
        lambda x, group: ops.permute_tensor(x, [1, 0], group),
        lambda x, group: funcol.permute_tensor(x, [1, 0], group),
    ),
    "permute_tensor, to one rank": (
        lambda x, group: ops.permute_tensor(x, [0, 0], group),
        lambda x, group: funcol.permute_tensor(x, [0, 0], group),
    ),
    "permute_tensor, from one rank": (
        lambda x, group: ops.permute_tensor(x, [1], group),
        lambda x, group: funcol.permute_tensor(x, [1], group),
    ),
    "reduce": (
        lambda x, group: ops.reduce(x, "min", 1, group),
        lambda x, group: funcol.reduce(x, "min", 1, group),
    ),
    "scatter": (
        lambda x, group: ops.scatter(x, 1, 1, group, [1, 5]),
        lambda x, group: funcol.scatter(x, 1, 1, group, split_sizes=[1, 5]),
    ),
    "scatter, no sizes": (
        lambda x, group: ops.scatter(x, 0, -1, group),
        lambda x, group: funcol.scatter(x, 0, -1, group),
    ),
    "gather": (
        lambda x, group: ops.gather(x, 1, 1, group, [6, 6]),
        lambda x, group: funcol.gather(x, 1, 1, group, split_sizes=[6, 6]),
    ),
    "gather, no sizes": (
        lambda x, group: ops.gather(x, 0, -1, group),
        lambda x, group: funcol.gather(x, 0, -1, group),
    ),
}

each_op = pytest.mark.parametrize("op", OPS)

GROUPS = {"name": name_of_world, "object": world_group}


def op_agrees(rank: int, world: int, op: str, group: str, dtype: torch.dtype) -> None:
    by_op, by_function = OPS[op]
    x = sample(rank, (4, 6), dtype)
    results = listed(by_op(x, GROUPS[group]()))
    assert all(map(funcol.is_pending, results))
    for actual, expected in zip(results, listed(by_function(x, world_group())), strict=True):
        assert_plain(actual, expected)


@each_op
@pytest.mark.parametrize("group", GROUPS)
def test_an_op_agrees_with_its_function(op: str, group: str) -> None:
    run_ranks(op_agrees, 2, op, group, torch.float32)


def op_has_meta_kernel(rank: int, world: int, op: str, layout: str, dtype: torch.dtype) -> None:
    by_op, _ = OPS[op]
    x = LAYOUTS[layout](rank, (4, 6), dtype)
    real = [metadata(result) for result in listed(by_op(x, name_of_world()))]
    assert [metadata(result) for result in listed(by_op(x.to("meta"), name_of_world()))] == real
    with FakeTensorMode() as mode:
        assert [metadata(result) for result in listed(by_op(mode.from_tensor(x), name_of_world()))] == real


@each_op
@pytest.mark.parametrize("layout", ["offset", "transposed", "strided"])
def test_an_op_gives_meta_and_fake_tensors_their_shapes(op: str, layout: str) -> None:
    run_ranks(op_has_meta_kernel, 2, op, layout, torch.float32)


SYMBOLIC: dict[str, Callable[[int, Any, Any], list[tuple[Any, Any]]]] = {
    "all_gather_along_dim, no sizes": lambda rank, rows, columns: [(rows, columns * 2)],
    "reduce_scatter_along_dim, no sizes": lambda rank, rows, columns: [(rows, columns // 2)],
    "reduce_scatter_along_dims_coalesced": lambda rank, rows, columns: [
        (rows // 2, columns),
        (rows, columns // 2),
    ],
    "all_to_all, no sizes": lambda rank, rows, columns: [(rows, columns)] * 2,
    "permute_tensor": lambda rank, rows, columns: [(rows, columns)],
    "permute_tensor, to one rank": lambda rank, rows, columns: [(rows * 2 * (1 - rank), columns)],
    "reduce": lambda rank, rows, columns: [(rows, columns)],
    "scatter, no sizes": lambda rank, rows, columns: [(rows, columns // 2)],
    "gather, no sizes": lambda rank, rows, columns: [(rows, columns * 2 * (1 - rank))],
}


@pytest.mark.parametrize("op", SYMBOLIC)
@on_ranks(2)
def test_a_meta_kernel_keeps_symbolic_sizes(rank: int, world: int, op: str) -> None:
    x, rows, columns = symbolic_meta_input()
    results = listed(OPS[op][0](x, name_of_world()))
    expected = [tuple(str(size) for size in shape) for shape in SYMBOLIC[op](rank, rows, columns)]
    assert [tuple(str(size) for size in result.shape) for result in results] == expected


def op_is_traced(rank: int, world: int, op: str, mode: str, layout: str, dtype: torch.dtype) -> None:
    by_op, _ = OPS[op]
    x = LAYOUTS[layout](rank, (4, 6), dtype)
    graph = make_fx(lambda x: listed(by_op(x, name_of_world())), tracing_mode=mode)(x)
    check_graph(graph)
    for actual, expected in zip(graph(x), listed(by_op(x, name_of_world())), strict=True):
        assert_plain(actual, expected)


@each_op
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_op_becomes_ops_of_core(op: str, mode: str) -> None:
    run_ranks(op_is_traced, 2, op, mode, "transposed", torch.float32)


MOVING_OPS = [op for op in OPS if not op.startswith("reduce")]


@pytest.mark.parametrize("op", MOVING_OPS)
@pytest.mark.parametrize("layout", ["conjugated", "offset"])
def test_a_traced_op_moves_complex_numbers(op: str, layout: str) -> None:
    run_ranks(op_is_traced, 2, op, "real", layout, torch.complex64)


@each_op
@on_ranks(2)
def test_a_functionalized_op_becomes_ops_of_core(rank: int, world: int, op: str) -> None:
    by_op, _ = OPS[op]
    x = sample(rank, (4, 6))

    def program(x: Tensor) -> list[Tensor]:
        y = x.clone()
        y.view(-1).mul_(2)
        return listed(by_op(y, name_of_world()))

    graph = make_fx(torch.func.functionalize(program))(x)
    check_graph(graph)
    for actual, expected in zip(graph(x), program(x), strict=True):
        assert_plain(actual, expected)


OPCHECKED: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "all_gather_along_dim": lambda x: (x, 1, name_of_world(), [3]),
    "reduce_scatter_along_dim": lambda x: (x, "sum", 1, name_of_world(), [3]),
    "reduce_scatter_along_dims_coalesced": lambda x: ([x, x + 1], "sum", [0, 1], name_of_world()),
    "all_to_all": lambda x: ([x], [4], name_of_world()),
    "permute_tensor": lambda x: (x, [0], name_of_world()),
    "reduce": lambda x: (x, "sum", 0, name_of_world()),
    "scatter": lambda x: (x, 0, 1, name_of_world(), [3]),
    "gather": lambda x: (x, 0, 1, name_of_world(), [3]),
}


@pytest.mark.parametrize("op", OPCHECKED)
# Its other two checks stumble over PyTorch's own wait_tensor, whose schema hides that it returns its input.
@pytest.mark.parametrize("check", ["test_autograd_registration", "test_aot_dispatch_dynamic"])
@on_ranks(1)
def test_an_op_passes_the_checks_of_pytorch(rank: int, world: int, op: str, check: str) -> None:
    torch.library.opcheck(getattr(ops, op).default, OPCHECKED[op](torch.randn(4, 3)), test_utils=check)
