"""A wrong call of a collective raises before anything is sent, and names the function and its mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks, run_ranks
from wrong_calls import (
    GROUP,
    NAME,
    NUM_RANKS,
    OTHER_RANK,
    THIS_RANK,
    TIMEOUT_S,
    WrongCall,
    by_all_or_one,
    inputs,
    makes_wrong_call,
    says,
    t,
    with_and_without_gradient,
)

ON_DEVICES = True

COALESCED = "reduce_scatter_tensor_coalesced"

# Sizes, dims, ranks

SIZES: dict[str, WrongCall] = {
    "reduce_scatter not divisible": says(ValueError, "dim 0", "size 3", "2 ranks", "Pad it").of(
        "reduce_scatter_tensor", t(3, 4), "sum", 0
    ),
    "reduce_scatter not divisible, last dim": says(ValueError, "dim 1", "size 5").of(
        "reduce_scatter_tensor", t(4, 5), "sum", -1
    ),
    "reduce_scatter of 0 dims": says(ValueError, "0-dim").of(
        "reduce_scatter_tensor", torch.tensor(1.0), "sum", 0
    ),
    "coalesced reduce_scatter not divisible": says(ValueError, "dim 0", "size 5", "2 ranks").of(
        COALESCED, [t(2), t(5, 2)], "sum", [0, 0]
    ),
    "coalesced reduce_scatter with a dim too few": says(ValueError, "1 scatter dims for 2 tensors").of(
        COALESCED, [t(2), t(2)], "sum", [0]
    ),
    "gather dim too large": says(IndexError, "dim is 2", "[2, 3]").of(
        "all_gather_tensor", t(2, 3), 2, op="all_gather"
    ),
    "gather dim too small": says(IndexError, "dim is -3").of(
        "all_gather_tensor", t(2, 3), -3, op="all_gather"
    ),
    "gather dim of 0 dims": says(IndexError, "dim is 1").of(
        "all_gather_tensor", torch.tensor(1.0), 1, op="all_gather"
    ),
    "scatter dim too large": says(IndexError, "dim is 2").of("reduce_scatter_tensor", t(2, 4), "sum", 2),
    "coalesced scatter dim too large": says(IndexError, "dim is 1").of(COALESCED, [t(2)], "sum", [1]),
    "source too large": says(ValueError, "src is rank 2", "ranks 0 to 1").of("broadcast", t(2), 2),
    "source negative": says(ValueError, "src is rank -1").of("broadcast", t(2), -1),
    "a tensor too few": says(ValueError, "1 tensors", "2 ranks").of("all_to_all", [t(2)], None),
    "rows that differ, no sizes": says(ValueError, "[2, 1]", "output_split_sizes").of(
        "all_to_all", [t(2, 3), t(1, 3)], None
    ),
    "another dim that differs": says(ValueError, "[2, 4]", "dim 0").of(
        "all_to_all", [t(2, 3), t(2, 4)], [2, 2]
    ),
    "sizes of a list too few": says(ValueError, "output_split_sizes", "1 entries").of(
        "all_to_all", [t(2), t(2)], [2]
    ),
    "own size of a list that differs": says(ValueError, "to itself", "[1, 3]", "[2, 2]").of(
        "all_to_all", [t(1), t(3)], [2, 2]
    ),
    "sizes of a list negative": says(ValueError, "[3, -1]").of("all_to_all", [t(2), t(2)], [3, -1]),
    "a list of 0-dim tensors": says(ValueError).of("all_to_all", [t(), t()], None),
    "a list of two dtypes": says(TypeError, "Double").of(
        "all_to_all", [t(2), t(2, dtype=torch.float64)], None
    ),
    "destination too large": says(ValueError, "rank 2").of("permute_tensor", t(2), [1, 2]),
    "too many destinations": says(ValueError, "3 entries", "2 ranks").of("permute_tensor", t(2), [1, 0, 0]),
}

# Split sizes of all_to_all_single: output, input, error, words, shape of the input

SPLITS: dict[str, WrongCall] = {
    what: says(error, *words).of("all_to_all_single", t(*shape), output_splits, input_splits)
    for what, output_splits, input_splits, error, words, shape in (
        ("rows not divisible", None, None, ValueError, ("dim 0", "size 3", "2 ranks"), (3,)),
        ("no rows at all", None, None, ValueError, ("0-dim",), ()),
        ("input splits below the rows", [2, 2], [1, 2], ValueError, ("[1, 2]", "sum up to 3", "4"), (4,)),
        ("input splits above the rows", [2, 2], [3, 2], ValueError, ("[3, 2]", "sum up to 5", "4"), (4,)),
        ("input splits too short", [2, 2], [4], ValueError, ("input_split_sizes has 1", "2 ranks"), (4,)),
        ("output splits too long", [2, 2, 0], [2, 2], ValueError, ("output_split_sizes has 3",), (4,)),
        ("negative input split", [2, 2], [5, -1], ValueError, ("[5, -1]", "negative"), (4,)),
        ("negative output split", [-1, 2], [2, 2], ValueError, ("[-1, 2]", "negative"), (4,)),
        ("own splits that differ", [2, 2], [1, 3], ValueError, ("to itself", "[1, 3]", "[2, 2]"), (4,)),
        ("output splits only", [2, 2], None, ValueError, ("[2, 2]", "both"), (4,)),
        ("input splits only", None, [2, 2], ValueError, ("[2, 2]", "both"), (4,)),
        ("splits of another type", 4, [2, 2], TypeError, ("output_split_sizes", "int"), (4,)),
        ("a split of another type", [2, 2], [2, "2"], TypeError, ("input_split_sizes", "str"), (4,)),
    )
}

# Types

TYPES: dict[str, WrongCall] = {
    "no tensor": says(TypeError, "all_reduce").of("all_reduce", [1.0], "sum"),
    "no tensor to gather": says(TypeError, "all_gather").of("all_gather_tensor", None, 0),
    "tensor for a list": says(TypeError, "all_reduce_coalesced").of("all_reduce_coalesced", 5, "sum"),
    "list of other things": says(TypeError, "all_gather_into_tensor_coalesced").of(
        "all_gather_into_tensor_coalesced", [t(2), 1.0]
    ),
    "dim as text": says(TypeError, "gather_dim", "str").of("all_gather_tensor", t(2), "0"),
    "dim as fraction": says(TypeError, "scatter_dim", "float").of("reduce_scatter_tensor", t(2), "sum", 0.5),
    "dims as number": says(TypeError, "scatter_dim", "int").of(COALESCED, [t(2)], "sum", 0),
    "source as text": says(TypeError, "src", "str").of("broadcast", t(2), "0"),
    "destinations as number": says(TypeError, "src_dst", "int").of("permute_tensor", t(2), 1),
    "group object for the reduce op": says(TypeError, "ProcessGroup").of(
        "all_reduce", t(2), GROUP, group="sum"
    ),
}

# Uneven collectives, and those with a root

# The arguments of each function between its input and the group, but for a dim or a root.
BEFORE_DIM: dict[str, tuple[Any, ...]] = {
    "all_gather_tensor": (),
    "reduce_scatter_tensor": ("sum",),
    "scatter": (0,),
    "gather": (0,),
}
OF_SHARDS = ["all_gather_tensor", "gather"]
OF_WHOLES = ["reduce_scatter_tensor", "scatter"]
SIZES_OF_DIMS = {"all_gather_tensor": [4, 4], "reduce_scatter_tensor": [1, 3]}


def of_root(function: str, root: Any, error: type[Exception], *words: str) -> WrongCall:
    arguments = ("sum", root) if function == "reduce" else (root, 0)
    return says(error, *words).of(function, t(4, 2), *arguments)


def with_sizes(
    function: str, sizes: Any, shape: tuple[int, ...], error: type[Exception], *words: str
) -> WrongCall:
    return says(error, *words).of(function, t(*shape), *BEFORE_DIM[function], 0, split_sizes=sizes)


def along_dim(function: str, dim: Any, error: type[Exception], *words: str) -> WrongCall:
    sizes = SIZES_OF_DIMS.get(function)
    return says(error, *words).of(function, t(4, 2), *BEFORE_DIM[function], dim, split_sizes=sizes)


PARTS: dict[str, WrongCall] = {
    **{
        f"{function}, {what}": with_sizes(function, sizes, (4, 2), error, *words)
        for functions, cases in (
            (
                list(BEFORE_DIM),
                (
                    ("too few sizes", [4], ValueError, ("split_sizes has 1 entries", "2 ranks")),
                    ("too many sizes", [4, 4, 4], ValueError, ("split_sizes has 3 entries", "2 ranks")),
                    ("no sizes", [], ValueError, ("split_sizes has 0 entries", "2 ranks")),
                    ("a negative size", [5, -1], ValueError, ("[5, -1]", "negative")),
                    ("sizes as number", 4, TypeError, ("split_sizes", "int")),
                    ("sizes as text", "44", TypeError, ("split_sizes", "str")),
                    ("a size as text", [4, "4"], TypeError, ("split_sizes", "str")),
                    ("a size as fraction", [4, 4.0], TypeError, ("split_sizes", "float")),
                ),
            ),
            (
                OF_WHOLES,
                (
                    ("sum too small", [1, 2], ValueError, ("[1, 2]", "sum up to 3", "dim 0 has size 4")),
                    ("sum too large", [3, 2], ValueError, ("[3, 2]", "sum up to 5", "dim 0 has size 4")),
                    ("sum past 64 bits", [2**63 - 1, 2**63 - 1], ValueError, ("split_sizes",)),
                ),
            ),
            (
                OF_SHARDS,
                (
                    ("another size", [3, 3], ValueError, ("[3, 3]", "dim 0 has size 4 on rank")),
                    ("none for this rank", [0, 0], ValueError, ("[0, 0]", "dim 0 has size 4 on rank")),
                ),
            ),
        )
        for function in functions
        for what, sizes, error, words in cases
    },
    **{
        f"{function}, 0 dims": with_sizes(function, [1, 1], (), ValueError, "0-dim", "Pass one with dims")
        for function in BEFORE_DIM
    },
    **{
        f"{function}, not divisible": with_sizes(
            function, None, (3, 2), ValueError, "dim 0 has size 3", "2 ranks", "Pad it"
        )
        for function in OF_WHOLES
    },
    **{
        f"{function}, dim {dim}": along_dim(function, dim, IndexError, f"dim is {dim}", "[4, 2]")
        for function in BEFORE_DIM
        for dim in (2, -3)
    },
    **{
        f"{function}, dim as {type(dim).__name__}": along_dim(
            function, dim, TypeError, "_dim", type(dim).__name__
        )
        for function in BEFORE_DIM
        for dim in ("0", 0.5, None)
    },
    **{
        f"{function}, root {root}": of_root(function, root, ValueError, f"is rank {root}", "ranks 0 to 1")
        for function in ("scatter", "gather", "reduce")
        for root in (2, -1)
    },
    **{
        f"{function}, root as {type(root).__name__}": of_root(
            function, root, TypeError, "src" if function == "scatter" else "dst", type(root).__name__
        )
        for function in ("scatter", "gather", "reduce")
        for root in ("0", 0.5, None)
    },
}

FUNCTIONS: dict[str, WrongCall] = {
    **SIZES,
    **SPLITS,
    **TYPES,
    **PARTS,
}


def makes(rank: int, world: int, table: str, case: str, mode: str, everybody: bool) -> None:
    makes_wrong_call(rank, world, globals()[table][case], mode, everybody)


@pytest.mark.parametrize("case", FUNCTIONS)
@by_all_or_one
@with_and_without_gradient
def test_a_wrong_call_is_refused(case: str, everybody: bool, gradient: bool) -> None:
    mode = "gradient" if gradient else "eager"
    run_ranks(makes, NUM_RANKS, "FUNCTIONS", case, mode, everybody, timeout=TIMEOUT_S)


# In a trace, an argument of a wrong type meets PyTorch's own check of schemas.
@pytest.mark.parametrize(
    ("mode", "case"),
    [
        (mode, case)
        for mode in ("meta", "fake")
        for case in PARTS
        if mode == "meta" or PARTS[case].error is not TypeError
    ],
)
@on_ranks(NUM_RANKS, timeout=TIMEOUT_S)
def test_a_wrong_call_is_refused_where_there_is_no_data(rank: int, world: int, case: str, mode: str) -> None:
    with inputs(mode):
        PARTS[case].raises()


# Operators, whose arguments no function checks

OPERATORS: dict[str, WrongCall] = {
    "op reduce_scatter not divisible": says(ValueError, "size 3").of_op(
        "reduce_scatter_tensor", t(3), "sum", NUM_RANKS, NAME
    ),
    "group_size of all_gather": says(ValueError, "group_size is 5", "2 ranks").of_op(
        "all_gather_into_tensor", t(2), 5, NAME
    ),
    "group_size of coalesced all_gather": says(ValueError, "group_size is 1").of_op(
        "all_gather_into_tensor_coalesced", [t(2)], 1, NAME
    ),
    "group_size of reduce_scatter": says(ValueError, "group_size is 4").of_op(
        "reduce_scatter_tensor", t(4), "sum", 4, NAME
    ),
    "group_size of coalesced reduce_scatter": says(ValueError, "group_size is 4").of_op(
        COALESCED, [t(4)], "sum", 4, NAME
    ),
    "group_size of all_gather out": says(ValueError, "group_size is 3").of_op(
        "all_gather_into_tensor_out", t(2), 3, NAME, out=t(6)
    ),
    "out of all_gather too small": says(ValueError, "[3]", "[4]").of_op(
        "all_gather_into_tensor_out", t(2), NUM_RANKS, NAME, out=t(3)
    ),
    "out of all_gather of another dtype": says(TypeError, "Int", "Float").of_op(
        "all_gather_into_tensor_out", t(2), NUM_RANKS, NAME, out=t(4, dtype=torch.int32)
    ),
    "out of reduce_scatter too large": says(ValueError, "[4]").of_op(
        "reduce_scatter_tensor_out", t(4), "sum", NUM_RANKS, NAME, out=t(4)
    ),
    "group_size of reduce_scatter out": says(ValueError, "group_size is 4").of_op(
        "reduce_scatter_tensor_out", t(4), "sum", 4, NAME, out=t(2)
    ),
    "out of reduce_scatter of another dtype": says(TypeError, "Int", "Float").of_op(
        "reduce_scatter_tensor_out", t(4), "sum", NUM_RANKS, NAME, out=t(2, dtype=torch.int32)
    ),
    "in-place all_reduce of strides": says(ValueError, "[3, 2]", "contiguous").of_op(
        "all_reduce_", t(2, 3, is_transposed=True), "sum", NAME
    ),
    "in-place broadcast of strides": says(ValueError, "[3, 2]", "contiguous").of_op(
        "broadcast_", t(2, 3, is_transposed=True), 0, NAME
    ),
    "send to itself": says(ValueError, "itself").of_op("isend", t(2), THIS_RANK, 0, NAME),
    "receive from nobody": says(ValueError, "rank 9").of_op("irecv", t(2), 9, 0, NAME),
    "negative tag": says(ValueError, "tag is -1").of_op("isend", t(2), OTHER_RANK, -1, NAME),
    "unknown kind in a batch": says(ValueError, "'send'", "'isend'").of_op(
        "batch_p2p_ops", ["send"], [OTHER_RANK], [0], [t(2)], NAME
    ),
    "batch of different lengths": says(ValueError, "0 tags").of_op(
        "batch_p2p_ops", ["isend"], [OTHER_RANK], [], [t(2)], NAME
    ),
}


@pytest.mark.parametrize("case", OPERATORS)
@by_all_or_one
def test_a_wrong_call_of_an_operator_is_refused(case: str, everybody: bool) -> None:
    run_ranks(makes, NUM_RANKS, "OPERATORS", case, "eager", everybody, timeout=TIMEOUT_S)


# Operators that are called where there is no data, too

TRACED_OPERATORS: dict[str, WrongCall] = {
    "all_gather_along_dim": says(ValueError, "[3, 3]", "size 4").of_op(
        "all_gather_along_dim", t(4), 0, NAME, [3, 3], op="all_gather_tensor"
    ),
    "all_gather_along_dim, dim": says(IndexError, "dim is 1").of_op(
        "all_gather_along_dim", t(4), 1, NAME, op="all_gather"
    ),
    "reduce_scatter_along_dim": says(ValueError, "[1, 2]", "size 4").of_op(
        "reduce_scatter_along_dim", t(4), "sum", 0, NAME, [1, 2], op="reduce_scatter_tensor"
    ),
    "reduce_scatter_along_dim, op": says(ValueError, "'mean'").of_op(
        "reduce_scatter_along_dim", t(4), "mean", 0, NAME, op="reduce_scatter_tensor"
    ),
    "reduce_scatter_along_dims_coalesced": says(ValueError, "1 scatter dims for 2 tensors").of_op(
        "reduce_scatter_along_dims_coalesced", [t(4), t(4)], "sum", [0], NAME, op=COALESCED
    ),
    "reduce_scatter_along_dims_coalesced, divisible": says(ValueError, "size 3").of_op(
        "reduce_scatter_along_dims_coalesced", [t(3)], "sum", [0], NAME, op=COALESCED
    ),
    "permute_tensor": says(ValueError, "rank 2").of_op("permute_tensor", t(4), [0, 2], NAME),
    "permute_tensor, entries": says(ValueError, "3 entries").of_op("permute_tensor", t(4), [0, 1, 0], NAME),
    "reduce": says(ValueError, "'mean'").of_op("reduce", t(4), "mean", 0, NAME),
    "reduce, dst": says(ValueError, "dst is rank 7").of_op("reduce", t(4), "sum", 7, NAME),
    "scatter": says(ValueError, "[-1, 5]").of_op("scatter", t(4), 0, 0, NAME, [-1, 5]),
    "gather": says(ValueError, "1 entries").of_op("gather", t(4), 0, 0, NAME, [4]),
}


@pytest.mark.parametrize("case", TRACED_OPERATORS)
@pytest.mark.parametrize("mode", ["eager", "gradient", "meta", "fake"])
def test_a_wrong_call_of_a_traced_operator_is_refused(case: str, mode: str) -> None:
    run_ranks(makes, NUM_RANKS, "TRACED_OPERATORS", case, mode, True, timeout=TIMEOUT_S)
