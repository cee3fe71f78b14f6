"""A size, dim, rank or split that does not fit raises before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import world_group
from ranks import run_ranks
from wrong_calls import (
    NUM_RANKS,
    TIMEOUT_S,
    Mistake,
    by_all_or_one,
    makes_mistake,
    name,
    ones,
    with_and_without_gradient,
)

import funcol

ON_DEVICES = True

ops = torch.ops.funcol


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
    "a tensor too few": Mistake(
        lambda: funcol.all_to_all([ones(2)], None, world_group()),
        ValueError,
        ("funcol::all_to_all", "1 tensors", "2 ranks"),
    ),
    "rows that differ, no sizes": Mistake(
        lambda: funcol.all_to_all([ones(2, 3), ones(1, 3)], None, world_group()),
        ValueError,
        ("funcol::all_to_all", "[2, 1]", "output_split_sizes"),
    ),
    "another dim that differs": Mistake(
        lambda: funcol.all_to_all([ones(2, 3), ones(2, 4)], [2, 2], world_group()),
        ValueError,
        ("funcol::all_to_all", "[2, 4]", "dim 0"),
    ),
    "sizes of a list too few": Mistake(
        lambda: funcol.all_to_all([ones(2), ones(2)], [2], world_group()),
        ValueError,
        ("funcol::all_to_all", "output_split_sizes", "1 entries"),
    ),
    "own size of a list that differs": Mistake(
        lambda: funcol.all_to_all([ones(1), ones(3)], [2, 2], world_group()),
        ValueError,
        ("funcol::all_to_all", "to itself", "[1, 3]", "[2, 2]"),
    ),
    "sizes of a list negative": Mistake(
        lambda: funcol.all_to_all([ones(2), ones(2)], [3, -1], world_group()),
        ValueError,
        ("funcol::all_to_all", "[3, -1]"),
    ),
    "a list of 0-dim tensors": Mistake(
        lambda: funcol.all_to_all([ones(), ones()], None, world_group()),
        ValueError,
        ("funcol::all_to_all",),
    ),
    "a list of two dtypes": Mistake(
        lambda: funcol.all_to_all([ones(2), ones(2).double()], None, world_group()),
        TypeError,
        ("funcol::all_to_all", "Double"),
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
    run_ranks(makes_mistake, NUM_RANKS, __name__, "SIZES", case, everybody, gradient, timeout=TIMEOUT_S)


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
    run_ranks(makes_mistake, NUM_RANKS, __name__, "OPERATORS", case, everybody, timeout=TIMEOUT_S)


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
    "own splits that differ": wrong_splits([2, 2], [1, 3], ValueError, "to itself", "[1, 3]", "[2, 2]"),
    "output splits only": wrong_splits([2, 2], None, ValueError, "[2, 2]", "both"),
    "input splits only": wrong_splits(None, [2, 2], ValueError, "[2, 2]", "both"),
    "splits of another type": wrong_splits(4, [2, 2], TypeError, "output_split_sizes", "int"),
    "a split of another type": wrong_splits([2, 2], [2, "2"], TypeError, "input_split_sizes", "str"),
}


@pytest.mark.parametrize("case", SPLITS)
@by_all_or_one
@with_and_without_gradient
def test_split_sizes_that_do_not_fit_are_refused(case: str, everybody: bool, gradient: bool) -> None:
    run_ranks(makes_mistake, NUM_RANKS, __name__, "SPLITS", case, everybody, gradient, timeout=TIMEOUT_S)
