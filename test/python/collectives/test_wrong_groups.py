"""A wrong group, reduce op, list or input raises before anything is sent, and names the function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import PROGRAM_SHAPE, PROGRAMS, world_group
from ranks import device_type, on_ranks, run_ranks
from torch.distributed.device_mesh import DeviceMesh
from wrong_calls import (
    NUM_RANKS,
    TIMEOUT_S,
    WRONG_GROUPS,
    WRONG_REDUCE_OPS,
    assert_raises,
    can_need_gradient,
    inputs,
    ones,
    with_and_without_gradient,
)

import funcol

ON_DEVICES = True

ops = torch.ops.funcol

# Groups

# A call of each function, given an input and a group.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        name: lambda x, group, tag, call=call: call(funcol, x, NUM_RANKS, group, tag)
        for name, call in PROGRAMS.items()
    },
    "all_gather_tensor, uneven": lambda x, group, tag: funcol.all_gather_tensor(
        x, 0, group, tag, split_sizes=[len(x)] * NUM_RANKS
    ),
    "reduce_scatter_tensor, uneven": lambda x, group, tag: funcol.reduce_scatter_tensor(
        x, "sum", 0, group, tag, split_sizes=[1, len(x) - 1]
    ),
    "reduce": lambda x, group, tag: funcol.reduce(x, "sum", 0, group, tag),
    "scatter": lambda x, group, tag: funcol.scatter(x, 0, 0, group, tag),
    "gather": lambda x, group, tag: funcol.gather(x, 0, 0, group, tag),
}


def name() -> str:
    return world_group().group_name


def op_of(function: str) -> str:
    return "funcol::" + function.partition(",")[0]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", WRONG_GROUPS)
@with_and_without_gradient
@on_ranks(NUM_RANKS, timeout=TIMEOUT_S)
def test_each_function_refuses_a_wrong_group(
    rank: int, world: int, function: str, case: str, gradient: bool
) -> None:
    make_group, error, words = WRONG_GROUPS[case]
    group = make_group()
    tag = "unheard of" if case == "list with an unknown tag" else ""
    x = torch.ones(PROGRAM_SHAPE, requires_grad=gradient)
    assert_raises(lambda: FUNCTIONS[function](x, group, tag), error, op_of(function), *words)


OPERATORS_OF_NOBODY: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: ops.all_reduce(ones(4), "sum", "nobody"),
    "all_reduce_": lambda: ops.all_reduce_(ones(4), "sum", "nobody"),
    "all_reduce_coalesced": lambda: ops.all_reduce_coalesced([ones(4)], "sum", "nobody"),
    "all_reduce_coalesced_": lambda: ops.all_reduce_coalesced_([ones(4)], "sum", "nobody"),
    "all_gather_into_tensor": lambda: ops.all_gather_into_tensor(ones(4), 2, "nobody"),
    "all_gather_into_tensor_out": lambda: ops.all_gather_into_tensor_out(ones(4), 2, "nobody", out=ones(8)),
    "all_gather_into_tensor_coalesced": lambda: ops.all_gather_into_tensor_coalesced([ones(4)], 2, "nobody"),
    "reduce_scatter_tensor": lambda: ops.reduce_scatter_tensor(ones(4), "sum", 2, "nobody"),
    "reduce_scatter_tensor_out": lambda: ops.reduce_scatter_tensor_out(
        ones(4), "sum", 2, "nobody", out=ones(2)
    ),
    "reduce_scatter_tensor_coalesced": lambda: ops.reduce_scatter_tensor_coalesced(
        [ones(4)], "sum", 2, "nobody"
    ),
    "all_to_all_single": lambda: ops.all_to_all_single(ones(4), [2, 2], [2, 2], "nobody"),
    "broadcast": lambda: ops.broadcast(ones(4), 0, "nobody"),
    "broadcast_": lambda: ops.broadcast_(ones(4), 0, "nobody"),
    "isend": lambda: ops.isend(ones(4), 1 - dist.get_rank(), 0, "nobody"),
    "irecv": lambda: ops.irecv(ones(4), 1 - dist.get_rank(), 0, "nobody"),
    "batch_p2p_ops": lambda: ops.batch_p2p_ops(["isend"], [1 - dist.get_rank()], [0], [ones(4)], "nobody"),
}


@pytest.mark.parametrize("op", OPERATORS_OF_NOBODY)
@on_ranks(NUM_RANKS, timeout=TIMEOUT_S)
def test_each_operator_refuses_an_unknown_group(rank: int, world: int, op: str) -> None:
    assert_raises(OPERATORS_OF_NOBODY[op], ValueError, f"funcol::{op}", "'nobody'")


@on_ranks(3, timeout=TIMEOUT_S)
def test_a_mesh_without_this_rank_is_refused(rank: int, world: int) -> None:
    mesh = DeviceMesh(device_type(), [0, 1])
    if rank == 2:
        for group in (mesh, (mesh, 0)):
            assert_raises(
                lambda group=group: funcol.all_reduce(ones(4), "sum", group),  # type: ignore[misc]
                ValueError,
                "funcol::all_reduce",
                "rank 2 does not belong to",
            )


# Reduce ops

REDUCTIONS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "all_reduce": lambda x, op: funcol.all_reduce(x, op, world_group()),
    "reduce_scatter_tensor": lambda x, op: funcol.reduce_scatter_tensor(x, op, 0, world_group()),
    "all_reduce_coalesced": lambda x, op: funcol.all_reduce_coalesced([x], op, world_group()),
    "reduce_scatter_tensor_coalesced": lambda x, op: funcol.reduce_scatter_tensor_coalesced(
        [x], op, [0], world_group()
    ),
    "reduce": lambda x, op: funcol.reduce(x, op, 1, world_group()),
    "reduce_scatter_tensor, uneven": lambda x, op: funcol.reduce_scatter_tensor(
        x, op, 0, world_group(), split_sizes=[1, 3]
    ),
}


# Gloo cannot do these. NCCL can, or ProcessGroupNCCL raises RuntimeError.
OF_GLOO = [case for case in WRONG_REDUCE_OPS if case.startswith(("avg", "sum on")) and case != "avg on bool"]


def reduce_op_cases() -> list[Any]:
    return [
        pytest.param(case, gradient, marks=[pytest.mark.cpu_only] if case in OF_GLOO else [])
        for case, (_, dtype, *_) in WRONG_REDUCE_OPS.items()
        for gradient in (False, True)
        if can_need_gradient(dtype) or not gradient
    ]


@pytest.mark.parametrize("function", REDUCTIONS)
@pytest.mark.parametrize(("case", "gradient"), reduce_op_cases())
@on_ranks(NUM_RANKS, timeout=TIMEOUT_S)
def test_each_reduction_refuses_a_wrong_op(
    rank: int, world: int, function: str, case: str, gradient: bool
) -> None:
    reduce_op, dtype, error, words = WRONG_REDUCE_OPS[case]
    x = torch.ones(4, dtype=dtype, requires_grad=gradient)
    assert_raises(lambda: REDUCTIONS[function](x, reduce_op), error, op_of(function), *words)


@pytest.mark.cpu_only  # NCCL has this op
@pytest.mark.parametrize("function", REDUCTIONS)
@on_ranks(NUM_RANKS, timeout=TIMEOUT_S)
def test_each_reduction_refuses_an_op_that_its_backend_lacks(rank: int, world: int, function: str) -> None:
    reduce_op = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(NotImplementedError, match=rf"{op_of(function)}: backend 'gloo' .* 'premul_sum'"):
        REDUCTIONS[function](ones(4), reduce_op)


# Mixed lists

COALESCED: dict[str, Callable[[list[Any]], Any]] = {
    "all_reduce_coalesced": lambda tensors: funcol.all_reduce_coalesced(tensors, "sum", world_group()),
    "all_gather_into_tensor_coalesced": lambda tensors: funcol.all_gather_into_tensor_coalesced(
        tensors, world_group()
    ),
    "reduce_scatter_tensor_coalesced": lambda tensors: funcol.reduce_scatter_tensor_coalesced(
        tensors, "sum", [0] * len(tensors), world_group()
    ),
    "op all_reduce_coalesced": lambda tensors: ops.all_reduce_coalesced(tensors, "sum", name()),
    "op all_reduce_coalesced_": lambda tensors: ops.all_reduce_coalesced_(tensors, "sum", name()),
    "op all_gather_into_tensor_coalesced": lambda tensors: ops.all_gather_into_tensor_coalesced(
        tensors, NUM_RANKS, name()
    ),
    "op reduce_scatter_tensor_coalesced": lambda tensors: ops.reduce_scatter_tensor_coalesced(
        tensors, "sum", NUM_RANKS, name()
    ),
}

MIXED: dict[str, tuple[Callable[[], list[torch.Tensor]], type[Exception], tuple[str, ...]]] = {
    "dtypes": (
        lambda: [ones(2), ones(2), ones(2, dtype=torch.float64)],
        TypeError,
        ("tensor 2 is Double", "tensor 0 is Float"),
    ),
    "devices": (
        lambda: [ones(2), torch.ones(2, device="meta")],
        ValueError,
        ("tensor 1 is on meta", "tensor 0 on cpu"),
    ),
    "devices, the other first": (
        lambda: [torch.ones(2, device="meta"), ones(2)],
        ValueError,
        ("tensor 1 is on cpu", "tensor 0 on meta"),
    ),
}


def refuses_mixed_list(rank: int, world: int, function: str, case: str, gradient: bool = False) -> None:
    make_tensors, error, words = MIXED[case]
    op = f"funcol::{function.removeprefix('op ')}"
    with inputs("gradient" if gradient else "eager"):
        here = [word.replace("cpu", device_type()) for word in words]
        assert_raises(lambda: COALESCED[function](make_tensors()), error, op, *here)


GATHERS = {function for function in COALESCED if "gather" in function}  # of several dtypes, too


@pytest.mark.parametrize(
    ("function", "case"),
    [(one, case) for one in COALESCED for case in MIXED if case != "dtypes" or one not in GATHERS],
)
def test_each_coalesced_function_refuses_a_mixed_list(function: str, case: str) -> None:
    run_ranks(refuses_mixed_list, NUM_RANKS, function, case, timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    "function", [one for one in COALESCED if not one.endswith("_") and one not in GATHERS]
)
def test_each_coalesced_function_refuses_mixed_dtypes_of_inputs_that_need_a_gradient(function: str) -> None:
    run_ranks(refuses_mixed_list, NUM_RANKS, function, "dtypes", True, timeout=TIMEOUT_S)


# Inputs that are not tensors

NO_TENSORS = {"text": "x", "list": [1.0], "nothing": None, "number": 1.0}

OF_A_TENSOR: dict[str, Callable[[Any], Any]] = {
    "all_gather_tensor": lambda x: funcol.all_gather_tensor(x, 0, world_group(), split_sizes=[1, 1]),
    "reduce_scatter_tensor": lambda x: funcol.reduce_scatter_tensor(
        x, "sum", 0, world_group(), split_sizes=[1, 1]
    ),
    "reduce": lambda x: funcol.reduce(x, "sum", 0, world_group()),
    "scatter": lambda x: funcol.scatter(x, 0, 0, world_group()),
    "gather": lambda x: funcol.gather(x, 0, 0, world_group()),
}


@pytest.mark.parametrize("function", OF_A_TENSOR)
@pytest.mark.parametrize("case", NO_TENSORS)
@on_ranks(1, timeout=TIMEOUT_S)
def test_each_function_refuses_inputs_that_are_no_tensors(
    rank: int, world: int, function: str, case: str
) -> None:
    value = NO_TENSORS[case]
    assert_raises(lambda: OF_A_TENSOR[function](value), TypeError, op_of(function), type(value).__name__)
