"""A wrong call raises before anything is sent: the right type, naming the function and what was wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from differential import PROGRAM_SHAPE, PROGRAMS, world_group
from ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import funcol

ops = torch.ops.funcol
NUM_RANKS = 2


class Mistake(NamedTuple):
    call: Callable[[], Any]
    error: type[Exception]
    words: tuple[str, ...]  # parts of the message


_needs_gradient = False


@contextmanager
def inputs_need_gradient(needed: bool) -> Iterator[None]:
    """Whether ``ones`` makes inputs that need a gradient, which takes a call through autograd."""
    global _needs_gradient
    _needs_gradient = needed
    try:
        yield
    finally:
        _needs_gradient = False


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=_needs_gradient)


def name() -> str:
    return world_group().group_name


def assert_raises(call: Callable[[], Any], error: type[Exception], *words: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error, repr(raised.value)
    for part in words:
        assert part in str(raised.value), f"{part!r} is not in: {raised.value}"


def makes_mistake(
    rank: int, world: int, mistakes: str, case: str, everybody: bool, gradient: bool = False
) -> None:
    mistake: Mistake = globals()[mistakes][case]
    if everybody or rank == world - 1:
        with inputs_need_gradient(gradient):
            assert_raises(mistake.call, mistake.error, *mistake.words)
    # A rank that had sent something would now be one collective ahead.
    assert funcol.all_reduce(torch.tensor(1.0), "sum", world_group()).item() == world


by_all_or_one = pytest.mark.parametrize("everybody", [True, False], ids=["all ranks", "one rank"])
with_and_without_gradient = pytest.mark.parametrize("gradient", [False, True], ids=["", "gradient"])
# A rank that hangs is one that had sent something.
TIMEOUT_S = 30


# Groups

WRONG_GROUPS: dict[str, tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "unknown name": (lambda: "nobody", ValueError, ("'nobody'",)),
    "non-member": (
        lambda: dist.GroupMember.NON_GROUP_MEMBER,
        ValueError,
        ("this rank does not belong", "NON_GROUP_MEMBER"),
    ),
    "list without this rank": (lambda: [7, 8], ValueError, ("rank ", "[7, 8]")),
    "lists without this rank": (lambda: [[7, 8], [9, 10]], ValueError, ("rank ", "[[7, 8], [9, 10]]")),
    "lists of several sizes": (lambda: [[0, 1], [2]], ValueError, ("[[0, 1], [2]]", "sizes [1, 2]")),
    "list that is no group": (lambda: [dist.get_rank(), 7], ValueError, ("no process group", "7]")),
    "list with an unknown tag": (lambda: [0, 1], ValueError, ("no process group", "'unheard of'")),
    "mesh of two dims": (lambda: init_device_mesh("cpu", (2, 1)), ValueError, ("2 dims", "expected 1")),
    "mesh dim out of range": (lambda: (init_device_mesh("cpu", (2,)), 1), ValueError, ("mesh dim 1",)),
    "tuple of other things": (lambda: (world_group(), 0), ValueError, ("expected (DeviceMesh, int)",)),
    "number": (lambda: 3.5, TypeError, ("float",)),
    "nothing": (lambda: None, TypeError, ("NoneType",)),
}


def refuses_group(rank: int, world: int, function: str, case: str, gradient: bool) -> None:
    make_group, error, words = WRONG_GROUPS[case]
    group = make_group()
    tag = "unheard of" if case == "list with an unknown tag" else ""
    x = torch.ones(PROGRAM_SHAPE, requires_grad=gradient)
    assert_raises(
        lambda: PROGRAMS[function](funcol, x, world, group, tag), error, f"funcol::{function}", *words
    )


@pytest.mark.parametrize("function", PROGRAMS)
@pytest.mark.parametrize("case", WRONG_GROUPS)
@with_and_without_gradient
def test_each_function_refuses_a_wrong_group(function: str, case: str, gradient: bool) -> None:
    run_ranks(refuses_group, NUM_RANKS, function, case, gradient, timeout=TIMEOUT_S)


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


def operator_refuses_an_unknown_group(rank: int, world: int, op: str) -> None:
    assert_raises(OPERATORS_OF_NOBODY[op], ValueError, f"funcol::{op}", "'nobody'")


@pytest.mark.parametrize("op", OPERATORS_OF_NOBODY)
def test_each_operator_refuses_an_unknown_group(op: str) -> None:
    run_ranks(operator_refuses_an_unknown_group, NUM_RANKS, op, timeout=TIMEOUT_S)


def refuses_a_mesh_without_this_rank(rank: int, world: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    if rank == 2:
        for group in (mesh, (mesh, 0)):
            assert_raises(
                lambda group=group: funcol.all_reduce(ones(4), "sum", group),  # type: ignore[misc]
                ValueError,
                "funcol::all_reduce",
                "rank 2 does not belong to",
            )


def test_a_mesh_without_this_rank_is_refused() -> None:
    run_ranks(refuses_a_mesh_without_this_rank, 3, timeout=TIMEOUT_S)


# Reduce ops


def can_need_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


REDUCTIONS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "all_reduce": lambda x, op: funcol.all_reduce(x, op, world_group()),
    "reduce_scatter_tensor": lambda x, op: funcol.reduce_scatter_tensor(x, op, 0, world_group()),
    "all_reduce_coalesced": lambda x, op: funcol.all_reduce_coalesced([x], op, world_group()),
    "reduce_scatter_tensor_coalesced": lambda x, op: funcol.reduce_scatter_tensor_coalesced(
        [x], op, [0], world_group()
    ),
}
WRONG_REDUCE_OPS: dict[str, tuple[Any, torch.dtype, type[Exception], tuple[str, ...]]] = {
    "unknown": ("mean", torch.float32, ValueError, ("'mean'", "sum, avg")),
    "empty name": ("", torch.float32, ValueError, ("''",)),
    "no factor": ("premul_sum", torch.float32, ValueError, ("'premul_sum'", "factor")),
    "number": (5, torch.float32, TypeError, ("int", "ReduceOp")),
    "nothing": (None, torch.float32, TypeError, ("NoneType", "ReduceOp")),
    **{
        f"{op} on {dtype}": (op, dtype, TypeError, (f"'{op}'", scalar_type))
        for op in ("band", "bor", "bxor")
        for dtype, scalar_type in ((torch.float32, "Float"), (torch.bfloat16, "BFloat16"))
    },
    "avg on bool": ("avg", torch.bool, TypeError, ("'avg'", "bool")),
    "avg on int32": ("avg", torch.int32, TypeError, ("average", "Int")),
    "avg on uint8": ("avg", torch.uint8, TypeError, ("average", "Byte")),
    "avg object on int64": (dist.ReduceOp.AVG, torch.int64, TypeError, ("average", "Long")),
    **{
        f"{op} on complex64": (op, torch.complex64, TypeError, (f"'{op}'", "complex"))
        for op in ("min", "max", "product", "band", "bor", "bxor")
    },
    "sum on int16": ("sum", torch.int16, TypeError, ("cannot reduce", "Short")),
    "sum on uint16": ("sum", torch.uint16, TypeError, ("cannot reduce", "UInt16")),
    "sum on float8": ("sum", torch.float8_e4m3fn, TypeError, ("cannot reduce", "Float8_e4m3fn")),
}


def refuses_reduce_op(rank: int, world: int, function: str, case: str, gradient: bool) -> None:
    reduce_op, dtype, error, words = WRONG_REDUCE_OPS[case]
    x = torch.ones(4, dtype=dtype, requires_grad=gradient)
    assert_raises(lambda: REDUCTIONS[function](x, reduce_op), error, f"funcol::{function}", *words)


@pytest.mark.parametrize("function", REDUCTIONS)
@pytest.mark.parametrize("case", WRONG_REDUCE_OPS)
def test_each_reduction_refuses_a_wrong_op(function: str, case: str) -> None:
    run_ranks(refuses_reduce_op, NUM_RANKS, function, case, False, timeout=TIMEOUT_S)


@pytest.mark.parametrize("function", REDUCTIONS)
@pytest.mark.parametrize(
    "case", [case for case, (_, dtype, *_) in WRONG_REDUCE_OPS.items() if can_need_gradient(dtype)]
)
def test_each_reduction_refuses_a_wrong_op_of_inputs_that_need_a_gradient(function: str, case: str) -> None:
    run_ranks(refuses_reduce_op, NUM_RANKS, function, case, True, timeout=TIMEOUT_S)


def refuses_premul_sum(rank: int, world: int, function: str) -> None:
    reduce_op = dist._make_nccl_premul_sum(2.0)
    with pytest.raises(NotImplementedError, match=rf"funcol::{function}: backend 'gloo' .* 'premul_sum'"):
        REDUCTIONS[function](ones(4), reduce_op)


@pytest.mark.parametrize("function", REDUCTIONS)
def test_each_reduction_refuses_an_op_that_its_backend_lacks(function: str) -> None:
    run_ranks(refuses_premul_sum, NUM_RANKS, function, timeout=TIMEOUT_S)


# Sizes, dims, ranks

SIZES = {
    "reduce_scatter not divisible": Mistake(
        lambda: funcol.reduce_scatter_tensor(ones(3, 4), "sum", 0, world_group()),
        ValueError,
        ("funcol::reduce_scatter_tensor", "dim 0", "size 3", "2 ranks", "Pad it"),
    ),
    "reduce_scatter not divisible, last dim": Mistake(
        lambda: funcol.reduce_scatter_tensor(ones(4, 5), "sum", -1, world_group()),
        ValueError,
        ("funcol::reduce_scatter_tensor", "dim 1", "size 5"),
    ),
    "reduce_scatter of 0 dims": Mistake(
        lambda: funcol.reduce_scatter_tensor(torch.tensor(1.0), "sum", 0, world_group()),
        ValueError,
        ("funcol::reduce_scatter_tensor", "0-dim"),
    ),
    "coalesced reduce_scatter not divisible": Mistake(
        lambda: funcol.reduce_scatter_tensor_coalesced([ones(2), ones(5, 2)], "sum", [0, 0], world_group()),
        ValueError,
        ("funcol::reduce_scatter_tensor_coalesced", "dim 0", "size 5", "2 ranks"),
    ),
    "coalesced reduce_scatter with a dim too few": Mistake(
        lambda: funcol.reduce_scatter_tensor_coalesced([ones(2), ones(2)], "sum", [0], world_group()),
        ValueError,
        ("funcol::reduce_scatter_tensor_coalesced", "1 scatter dims for 2 tensors"),
    ),
    "gather dim too large": Mistake(
        lambda: funcol.all_gather_tensor(ones(2, 3), 2, world_group()),
        IndexError,
        ("funcol::all_gather", "dim is 2", "[2, 3]"),
    ),
    "gather dim too small": Mistake(
        lambda: funcol.all_gather_tensor(ones(2, 3), -3, world_group()),
        IndexError,
        ("funcol::all_gather", "dim is -3"),
    ),
    "gather dim of 0 dims": Mistake(
        lambda: funcol.all_gather_tensor(torch.tensor(1.0), 1, world_group()),
        IndexError,
        ("funcol::all_gather", "dim is 1"),
    ),
    "scatter dim too large": Mistake(
        lambda: funcol.reduce_scatter_tensor(ones(2, 4), "sum", 2, world_group()),
        IndexError,
        ("funcol::reduce_scatter_tensor", "dim is 2"),
    ),
    "coalesced scatter dim too large": Mistake(
        lambda: funcol.reduce_scatter_tensor_coalesced([ones(2)], "sum", [1], world_group()),
        IndexError,
        ("funcol::reduce_scatter_tensor_coalesced", "dim is 1"),
    ),
    "source too large": Mistake(
        lambda: funcol.broadcast(ones(2), 2, world_group()),
        ValueError,
        ("funcol::broadcast", "src is rank 2", "ranks 0 to 1"),
    ),
    "source negative": Mistake(
        lambda: funcol.broadcast(ones(2), -1, world_group()),
        ValueError,
        ("funcol::broadcast", "src is rank -1"),
    ),
    "destination too large": Mistake(
        lambda: funcol.permute_tensor(ones(2), [1, 2], world_group()),
        ValueError,
        ("funcol::permute_tensor", "rank 2"),
    ),
    "too many destinations": Mistake(
        lambda: funcol.permute_tensor(ones(2), [1, 0, 0], world_group()),
        ValueError,
        ("funcol::permute_tensor", "3 entries", "2 ranks"),
    ),
}


@pytest.mark.parametrize("case", SIZES)
@by_all_or_one
@with_and_without_gradient
def test_a_size_dim_or_rank_that_does_not_fit_is_refused(case: str, everybody: bool, gradient: bool) -> None:
    run_ranks(makes_mistake, NUM_RANKS, "SIZES", case, everybody, gradient, timeout=TIMEOUT_S)


# Arguments that only the operators have

OPERATORS = {
    "op reduce_scatter not divisible": Mistake(
        lambda: ops.reduce_scatter_tensor(ones(3), "sum", NUM_RANKS, name()),
        ValueError,
        ("funcol::reduce_scatter_tensor", "size 3"),
    ),
    "group_size of all_gather": Mistake(
        lambda: ops.all_gather_into_tensor(ones(2), 5, name()),
        ValueError,
        ("funcol::all_gather_into_tensor", "group_size is 5", "2 ranks"),
    ),
    "group_size of coalesced all_gather": Mistake(
        lambda: ops.all_gather_into_tensor_coalesced([ones(2)], 1, name()),
        ValueError,
        ("funcol::all_gather_into_tensor_coalesced", "group_size is 1"),
    ),
    "group_size of reduce_scatter": Mistake(
        lambda: ops.reduce_scatter_tensor(ones(4), "sum", 4, name()),
        ValueError,
        ("funcol::reduce_scatter_tensor", "group_size is 4"),
    ),
    "group_size of coalesced reduce_scatter": Mistake(
        lambda: ops.reduce_scatter_tensor_coalesced([ones(4)], "sum", 4, name()),
        ValueError,
        ("funcol::reduce_scatter_tensor_coalesced", "group_size is 4"),
    ),
    "group_size of all_gather out": Mistake(
        lambda: ops.all_gather_into_tensor_out(ones(2), 3, name(), out=ones(6)),
        ValueError,
        ("funcol::all_gather_into_tensor_out", "group_size is 3"),
    ),
    "out of all_gather too small": Mistake(
        lambda: ops.all_gather_into_tensor_out(ones(2), NUM_RANKS, name(), out=ones(3)),
        ValueError,
        ("funcol::all_gather_into_tensor_out", "[3]", "[4]"),
    ),
    "out of all_gather of another dtype": Mistake(
        lambda: ops.all_gather_into_tensor_out(ones(2), NUM_RANKS, name(), out=ones(4, dtype=torch.int32)),
        TypeError,
        ("funcol::all_gather_into_tensor_out", "Int", "Float"),
    ),
    "out of reduce_scatter too large": Mistake(
        lambda: ops.reduce_scatter_tensor_out(ones(4), "sum", NUM_RANKS, name(), out=ones(4)),
        ValueError,
        ("funcol::reduce_scatter_tensor_out", "[4]"),
    ),
    "group_size of reduce_scatter out": Mistake(
        lambda: ops.reduce_scatter_tensor_out(ones(4), "sum", 4, name(), out=ones(2)),
        ValueError,
        ("funcol::reduce_scatter_tensor_out", "group_size is 4"),
    ),
    "out of reduce_scatter of another dtype": Mistake(
        lambda: ops.reduce_scatter_tensor_out(
            ones(4), "sum", NUM_RANKS, name(), out=ones(2, dtype=torch.int32)
        ),
        TypeError,
        ("funcol::reduce_scatter_tensor_out", "Int", "Float"),
    ),
    "in-place all_reduce of strides": Mistake(
        lambda: ops.all_reduce_(ones(2, 3).t(), "sum", name()),
        ValueError,
        ("funcol::all_reduce_", "[3, 2]", "contiguous"),
    ),
    "in-place broadcast of strides": Mistake(
        lambda: ops.broadcast_(ones(2, 3).t(), 0, name()),
        ValueError,
        ("funcol::broadcast_", "[3, 2]", "contiguous"),
    ),
    "send to itself": Mistake(
        lambda: ops.isend(ones(2), dist.get_rank(), 0, name()), ValueError, ("funcol::isend", "itself")
    ),
    "receive from nobody": Mistake(
        lambda: ops.irecv(ones(2), 9, 0, name()), ValueError, ("funcol::irecv", "rank 9")
    ),
    "negative tag": Mistake(
        lambda: ops.isend(ones(2), 1 - dist.get_rank(), -1, name()),
        ValueError,
        ("funcol::isend", "tag is -1"),
    ),
    "unknown kind in a batch": Mistake(
        lambda: ops.batch_p2p_ops(["send"], [1 - dist.get_rank()], [0], [ones(2)], name()),
        ValueError,
        ("funcol::batch_p2p_ops", "'send'", "'isend'"),
    ),
    "batch of different lengths": Mistake(
        lambda: ops.batch_p2p_ops(["isend"], [1 - dist.get_rank()], [], [ones(2)], name()),
        ValueError,
        ("funcol::batch_p2p_ops", "0 tags"),
    ),
}


@pytest.mark.parametrize("case", OPERATORS)
@by_all_or_one
def test_an_argument_of_an_operator_that_does_not_fit_is_refused(case: str, everybody: bool) -> None:
    run_ranks(makes_mistake, NUM_RANKS, "OPERATORS", case, everybody, timeout=TIMEOUT_S)


# Split sizes


def wrong_splits(
    output_splits: Any, input_splits: Any, error: type[Exception], *words: str, shape: tuple[int, ...] = (4,)
) -> Mistake:
    return Mistake(
        lambda: funcol.all_to_all_single(ones(*shape), output_splits, input_splits, world_group()),
        error,
        ("funcol::all_to_all_single", *words),
    )


SPLITS = {
    "rows not divisible": wrong_splits(None, None, ValueError, "dim 0", "size 3", "2 ranks", shape=(3,)),
    "no rows at all": wrong_splits(None, None, ValueError, "0-dim", shape=()),
    "input splits below the rows": wrong_splits([2, 2], [1, 2], ValueError, "[1, 2]", "sum up to 3", "4"),
    "input splits above the rows": wrong_splits([2, 2], [3, 2], ValueError, "[3, 2]", "sum up to 5", "4"),
    "input splits too short": wrong_splits([2, 2], [4], ValueError, "input_split_sizes has 1", "2 ranks"),
    "output splits too long": wrong_splits([2, 2, 0], [2, 2], ValueError, "output_split_sizes has 3"),
    "negative input split": wrong_splits([2, 2], [5, -1], ValueError, "[5, -1]", "negative"),
    "negative output split": wrong_splits([-1, 2], [2, 2], ValueError, "[-1, 2]", "negative"),
    "output splits only": wrong_splits([2, 2], None, ValueError, "[2, 2]", "both"),
    "input splits only": wrong_splits(None, [2, 2], ValueError, "[2, 2]", "both"),
    "splits of another type": wrong_splits(4, [2, 2], TypeError, "output_split_sizes", "int"),
    "a split of another type": wrong_splits([2, 2], [2, "2"], TypeError, "input_split_sizes", "str"),
}


@pytest.mark.parametrize("case", SPLITS)
@by_all_or_one
@with_and_without_gradient
def test_split_sizes_that_do_not_fit_are_refused(case: str, everybody: bool, gradient: bool) -> None:
    run_ranks(makes_mistake, NUM_RANKS, "SPLITS", case, everybody, gradient, timeout=TIMEOUT_S)


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
    with inputs_need_gradient(gradient):
        assert_raises(lambda: COALESCED[function](make_tensors()), error, op, *words)


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


# Types

TYPES = {
    "no tensor": Mistake(lambda: funcol.all_reduce([1.0], "sum", world_group()), TypeError, ("all_reduce",)),
    "no tensor to gather": Mistake(
        lambda: funcol.all_gather_tensor(None, 0, world_group()), TypeError, ("all_gather",)
    ),
    "tensor for a list": Mistake(
        lambda: funcol.all_reduce_coalesced(5, "sum", world_group()), TypeError, ("all_reduce_coalesced",)
    ),
    "list of other things": Mistake(
        lambda: funcol.all_gather_into_tensor_coalesced([ones(2), 1.0], world_group()),
        TypeError,
        ("all_gather_into_tensor_coalesced",),
    ),
    "dim as text": Mistake(
        lambda: funcol.all_gather_tensor(ones(2), "0", world_group()),
        TypeError,
        ("funcol::all_gather_tensor", "gather_dim", "str"),
    ),
    "dim as fraction": Mistake(
        lambda: funcol.reduce_scatter_tensor(ones(2), "sum", 0.5, world_group()),
        TypeError,
        ("funcol::reduce_scatter_tensor", "scatter_dim", "float"),
    ),
    "dims as number": Mistake(
        lambda: funcol.reduce_scatter_tensor_coalesced([ones(2)], "sum", 0, world_group()),
        TypeError,
        ("funcol::reduce_scatter_tensor_coalesced", "scatter_dim", "int"),
    ),
    "source as text": Mistake(
        lambda: funcol.broadcast(ones(2), "0", world_group()),
        TypeError,
        ("funcol::broadcast", "src", "str"),
    ),
    "destinations as number": Mistake(
        lambda: funcol.permute_tensor(ones(2), 1, world_group()),
        TypeError,
        ("funcol::permute_tensor", "src_dst", "int"),
    ),
    "group object for the reduce op": Mistake(
        lambda: funcol.all_reduce(ones(2), world_group(), "sum"),
        TypeError,
        ("funcol::all_reduce", "ProcessGroup"),
    ),
}


@pytest.mark.parametrize("case", TYPES)
@by_all_or_one
@with_and_without_gradient
def test_an_argument_of_a_wrong_type_is_refused(case: str, everybody: bool, gradient: bool) -> None:
    run_ranks(makes_mistake, NUM_RANKS, "TYPES", case, everybody, gradient, timeout=TIMEOUT_S)
