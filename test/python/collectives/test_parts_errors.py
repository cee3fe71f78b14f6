"""A wrong call of an uneven or rooted collective raises before anything is sent, wherever it is made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from differential import world_group
from ranks import run_ranks
from torch import Tensor
from torch._subclasses import FakeTensorMode
from wrong_calls import (
    WRONG_GROUPS,
    Mistake,
    assert_raises,
    by_all_or_one,
    with_and_without_gradient,
)

import funcol

ON_DEVICES = True

NUM_RANKS = 2


# A rank that hangs is one that had sent something.
TIMEOUT_S = 30

Call = Callable[[Any], Any]

_device: str | None = None  # that of the ranks

_gradient = False


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=_device, requires_grad=_gradient)


# One call of each function, given split_sizes and the shape of the input.
UNEVEN: dict[str, Callable[..., Any]] = {
    "all_gather_tensor": lambda sizes, *shape: funcol.all_gather_tensor(
        ones(*shape), 0, world_group(), split_sizes=sizes
    ),
    "reduce_scatter_tensor": lambda sizes, *shape: funcol.reduce_scatter_tensor(
        ones(*shape), "sum", 0, world_group(), split_sizes=sizes
    ),
    "scatter": lambda sizes, *shape: funcol.scatter(ones(*shape), 0, 0, world_group(), split_sizes=sizes),
    "gather": lambda sizes, *shape: funcol.gather(ones(*shape), 0, 0, world_group(), split_sizes=sizes),
}

OF_SHARDS = ["all_gather_tensor", "gather"]

OF_WHOLES = ["reduce_scatter_tensor", "scatter"]


def mistake(
    function: str, sizes: Any, shape: tuple[int, ...], error: type[Exception], *words: str
) -> Mistake:
    return Mistake(lambda: UNEVEN[function](sizes, *shape), error, (f"funcol::{function}", *words))


MISTAKES: dict[str, Mistake] = {
    **{
        f"{function}, {what}": mistake(function, sizes, (4, 2), error, *words)
        for function in UNEVEN
        for what, sizes, error, words in (
            ("too few sizes", [4], ValueError, ("split_sizes has 1 entries", "2 ranks")),
            ("too many sizes", [4, 4, 4], ValueError, ("split_sizes has 3 entries", "2 ranks")),
            ("no sizes", [], ValueError, ("split_sizes has 0 entries", "2 ranks")),
            ("a negative size", [5, -1], ValueError, ("[5, -1]", "negative")),
            ("sizes as number", 4, TypeError, ("split_sizes", "int")),
            ("sizes as text", "44", TypeError, ("split_sizes", "str")),
            ("a size as text", [4, "4"], TypeError, ("split_sizes", "str")),
            ("a size as fraction", [4, 4.0], TypeError, ("split_sizes", "float")),
        )
    },
    **{
        f"{function}, {what}": mistake(function, sizes, (4, 2), ValueError, *words)
        for function in OF_WHOLES
        for what, sizes, words in (
            ("sum too small", [1, 2], ("[1, 2]", "sum up to 3", "dim 0 has size 4")),
            ("sum too large", [3, 2], ("[3, 2]", "sum up to 5", "dim 0 has size 4")),
            ("sum past 64 bits", [2**63 - 1, 2**63 - 1], ("split_sizes",)),
        )
    },
    **{
        f"{function}, {what}": mistake(function, sizes, (4, 2), ValueError, *words)
        for function in OF_SHARDS
        for what, sizes, words in (
            ("another size", [3, 3], ("[3, 3]", "dim 0 has size 4 on rank")),
            ("none for this rank", [0, 0], ("[0, 0]", "dim 0 has size 4 on rank")),
        )
    },
    **{
        f"{function}, 0 dims": mistake(function, [1, 1], (), ValueError, "0-dim", "Pass one with dims")
        for function in UNEVEN
    },
    **{
        f"{function}, not divisible": mistake(
            function, None, (3, 2), ValueError, "dim 0 has size 3", "2 ranks", "Pad it"
        )
        for function in OF_WHOLES
    },
    **{
        f"{function}, dim {dim}": Mistake(
            lambda function=function, dim=dim: DIMS[function](ones(4, 2), dim),
            IndexError,
            (f"funcol::{function}", f"dim is {dim}", "[4, 2]"),
        )
        for function in UNEVEN
        for dim in (2, -3)
    },
    **{
        f"{function}, dim as {type(dim).__name__}": Mistake(
            lambda function=function, dim=dim: DIMS[function](ones(4, 2), dim),
            TypeError,
            (f"funcol::{function}", "_dim", type(dim).__name__),
        )
        for function in UNEVEN
        for dim in ("0", 0.5, None)
    },
    **{
        f"{function}, root {root}": Mistake(
            lambda function=function, root=root: ROOTS[function](ones(4, 2), root),
            ValueError,
            (f"funcol::{function}", f"is rank {root}", "ranks 0 to 1"),
        )
        for function in ("scatter", "gather", "reduce")
        for root in (2, -1)
    },
    **{
        f"{function}, root as {type(root).__name__}": Mistake(
            lambda function=function, root=root: ROOTS[function](ones(4, 2), root),
            TypeError,
            (f"funcol::{function}", "src" if function == "scatter" else "dst", type(root).__name__),
        )
        for function in ("scatter", "gather", "reduce")
        for root in ("0", 0.5, None)
    },
}

DIMS: dict[str, Callable[[Tensor, Any], Any]] = {
    "all_gather_tensor": lambda x, dim: funcol.all_gather_tensor(x, dim, world_group(), split_sizes=[4, 4]),
    "reduce_scatter_tensor": lambda x, dim: funcol.reduce_scatter_tensor(
        x, "sum", dim, world_group(), split_sizes=[1, 3]
    ),
    "scatter": lambda x, dim: funcol.scatter(x, 0, dim, world_group()),
    "gather": lambda x, dim: funcol.gather(x, 0, dim, world_group()),
}

ROOTS: dict[str, Callable[[Tensor, Any], Any]] = {
    "scatter": lambda x, src: funcol.scatter(x, src, 0, world_group()),
    "gather": lambda x, dst: funcol.gather(x, dst, 0, world_group()),
    "reduce": lambda x, dst: funcol.reduce(x, "sum", dst, world_group()),
}


def makes_mistake(rank: int, world: int, case: str, everybody: bool, gradient: bool) -> None:
    global _gradient
    wrong = MISTAKES[case]
    if everybody or rank == world - 1:
        _gradient = gradient
        try:
            assert_raises(wrong.call, wrong.error, *wrong.words)
        finally:
            _gradient = False
    # A rank that had sent something would now be one collective ahead.
    assert funcol.all_reduce(torch.tensor(1.0), "sum", world_group()).item() == world


@pytest.mark.parametrize("case", MISTAKES)
@by_all_or_one
@with_and_without_gradient
def test_an_argument_that_does_not_fit_is_refused(case: str, everybody: bool, gradient: bool) -> None:
    run_ranks(makes_mistake, NUM_RANKS, case, everybody, gradient, timeout=TIMEOUT_S)


def makes_mistake_without_data(rank: int, world: int, case: str, mode: str) -> None:
    global _device
    wrong = MISTAKES[case]
    _device = "meta" if mode == "meta" else None
    try:
        with FakeTensorMode() if mode == "fake" else nullcontext():
            assert_raises(wrong.call, wrong.error, *wrong.words)
    finally:
        _device = None


# In a trace, an argument of a wrong type meets PyTorch's own check of schemas.
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        (mode, case)
        for mode in ("meta", "fake")
        for case in MISTAKES
        if mode == "meta" or MISTAKES[case].error is not TypeError
    ],
)
def test_an_argument_that_does_not_fit_is_refused_where_there_is_no_data(mode: str, case: str) -> None:
    run_ranks(makes_mistake_without_data, NUM_RANKS, case, mode, timeout=TIMEOUT_S)


# Groups and reduce ops


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "all_gather_tensor": lambda x, group, tag: funcol.all_gather_tensor(
        x, 0, group, tag, split_sizes=[len(x)] * NUM_RANKS
    ),
    "reduce_scatter_tensor": lambda x, group, tag: funcol.reduce_scatter_tensor(
        x, "sum", 0, group, tag, split_sizes=[1, len(x) - 1]
    ),
    "reduce": lambda x, group, tag: funcol.reduce(x, "sum", 0, group, tag),
    "scatter": lambda x, group, tag: funcol.scatter(x, 0, 0, group, tag),
    "gather": lambda x, group, tag: funcol.gather(x, 0, 0, group, tag),
}


def refuses_group(rank: int, world: int, function: str, case: str, gradient: bool) -> None:
    make_group, error, words = WRONG_GROUPS[case]
    tag = "unheard of" if case == "list with an unknown tag" else ""
    x = torch.ones(4, 3, requires_grad=gradient)
    group = make_group()
    assert_raises(lambda: FUNCTIONS[function](x, group, tag), error, f"funcol::{function}", *words)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", WRONG_GROUPS)
@with_and_without_gradient
def test_each_function_refuses_a_wrong_group(function: str, case: str, gradient: bool) -> None:
    run_ranks(refuses_group, NUM_RANKS, function, case, gradient, timeout=TIMEOUT_S)


# Tensors


NO_TENSORS = {"text": "x", "list": [1.0], "nothing": None, "number": 1.0}


def refuses_no_tensor(rank: int, world: int, function: str, case: str) -> None:
    calls: dict[str, Call] = {
        "all_gather_tensor": lambda x: funcol.all_gather_tensor(x, 0, world_group(), split_sizes=[1, 1]),
        "reduce_scatter_tensor": lambda x: funcol.reduce_scatter_tensor(
            x, "sum", 0, world_group(), split_sizes=[1, 1]
        ),
        "reduce": lambda x: funcol.reduce(x, "sum", 0, world_group()),
        "scatter": lambda x: funcol.scatter(x, 0, 0, world_group()),
        "gather": lambda x: funcol.gather(x, 0, 0, world_group()),
    }
    value = NO_TENSORS[case]
    assert_raises(lambda: calls[function](value), TypeError, f"funcol::{function}", type(value).__name__)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("case", NO_TENSORS)
def test_each_function_refuses_what_is_no_tensor(function: str, case: str) -> None:
    run_ranks(refuses_no_tensor, 1, function, case, timeout=TIMEOUT_S)


# The operators, past the checks of the functions


ops = torch.ops.funcol

OPERATORS: dict[str, Mistake] = {
    "all_gather_along_dim": Mistake(
        lambda: ops.all_gather_along_dim(ones(4), 0, world_group().group_name, [3, 3]),
        ValueError,
        ("funcol::all_gather_tensor", "[3, 3]", "size 4"),
    ),
    "all_gather_along_dim, dim": Mistake(
        lambda: ops.all_gather_along_dim(ones(4), 1, world_group().group_name),
        IndexError,
        ("funcol::all_gather", "dim is 1"),
    ),
    "reduce_scatter_along_dim": Mistake(
        lambda: ops.reduce_scatter_along_dim(ones(4), "sum", 0, world_group().group_name, [1, 2]),
        ValueError,
        ("funcol::reduce_scatter_tensor", "[1, 2]", "size 4"),
    ),
    "reduce_scatter_along_dim, op": Mistake(
        lambda: ops.reduce_scatter_along_dim(ones(4), "mean", 0, world_group().group_name),
        ValueError,
        ("funcol::reduce_scatter_tensor", "'mean'"),
    ),
    "reduce_scatter_along_dims_coalesced": Mistake(
        lambda: ops.reduce_scatter_along_dims_coalesced(
            [ones(4), ones(4)], "sum", [0], world_group().group_name
        ),
        ValueError,
        ("funcol::reduce_scatter_tensor_coalesced", "1 scatter dims for 2 tensors"),
    ),
    "reduce_scatter_along_dims_coalesced, divisible": Mistake(
        lambda: ops.reduce_scatter_along_dims_coalesced([ones(3)], "sum", [0], world_group().group_name),
        ValueError,
        ("funcol::reduce_scatter_tensor_coalesced", "size 3"),
    ),
    "permute_tensor": Mistake(
        lambda: ops.permute_tensor(ones(4), [0, 2], world_group().group_name),
        ValueError,
        ("funcol::permute_tensor", "rank 2"),
    ),
    "permute_tensor, entries": Mistake(
        lambda: ops.permute_tensor(ones(4), [0, 1, 0], world_group().group_name),
        ValueError,
        ("funcol::permute_tensor", "3 entries"),
    ),
    "reduce": Mistake(
        lambda: ops.reduce(ones(4), "mean", 0, world_group().group_name),
        ValueError,
        ("funcol::reduce", "'mean'"),
    ),
    "reduce, dst": Mistake(
        lambda: ops.reduce(ones(4), "sum", 7, world_group().group_name), ValueError, ("dst is rank 7",)
    ),
    "scatter": Mistake(
        lambda: ops.scatter(ones(4), 0, 0, world_group().group_name, [-1, 5]),
        ValueError,
        ("funcol::scatter", "[-1, 5]"),
    ),
    "gather": Mistake(
        lambda: ops.gather(ones(4), 0, 0, world_group().group_name, [4]),
        ValueError,
        ("funcol::gather", "1 entries"),
    ),
}


def makes_mistake_with_operator(rank: int, world: int, case: str, mode: str) -> None:
    global _device, _gradient
    wrong = OPERATORS[case]
    _device = "meta" if mode == "meta" else None
    _gradient = mode == "gradient"
    try:
        with FakeTensorMode() if mode == "fake" else nullcontext():
            assert_raises(wrong.call, wrong.error, *wrong.words)
    finally:
        _device, _gradient = None, False
    assert funcol.all_reduce(torch.tensor(1.0), "sum", world_group()).item() == world


@pytest.mark.parametrize("case", OPERATORS)
@pytest.mark.parametrize("mode", ["eager", "gradient", "meta", "fake"])
def test_an_operator_refuses_an_argument_that_does_not_fit(case: str, mode: str) -> None:
    run_ranks(makes_mistake_with_operator, NUM_RANKS, case, mode, timeout=TIMEOUT_S)
