"""Calls of the package spmd_types, their inputs and outcomes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from in_place import is_supported
from ranks import device_type, run_ranks
from torch import Tensor

import funcol

spmd = pytest.importorskip("spmd_types", exc_type=ImportError)

WORLDS = [2, 4]

I, P, R, V, S = spmd.I, spmd.P, spmd.R, spmd.V, spmd.S  # noqa: E741

HAS_ASYNC_OP = "async_op" in inspect.signature(spmd.all_reduce).parameters  # from 0.3.1 on


class Case(NamedTuple):
    """A call of the package's API on an input of ``shape``, in which None is the number of ranks."""

    function: str
    source: Any
    target: Any
    shape: tuple[int | None, ...] = (8, 8)
    options: dict[str, Any] = {}  # noqa: RUF012
    is_pending: bool = True
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        options = "".join(f"-{name}={value}" for name, value in self.options.items())
        shape = "x".join(str(size or "n") for size in self.shape)
        return f"{self.function}-{self.source}-{self.target}-{shape}-{self.dtype}{options}".replace(" ", "")


EXPERT = {"expert_mode": True}

IN_HALF = {"op_dtype": torch.bfloat16, "backward_options": {"op_dtype": torch.float32}}

COLLECTIVES = [
    *[Case("all_reduce", source, target) for source in (P, V) for target in (R, I)],
    *[
        Case("all_gather", source, target, shape)
        for target in (R, I)
        for source in (S(0), S(1), S(-1))
        for shape in [(2, 3), (1, 4), (0, 3)]
    ],
    *[
        Case("all_gather", V, target, shape, {"gather_dim": dim})
        for target in (R, I)
        for shape, dim in [((2, 3), None), ((2, 3), 0), ((2, 3), 1), ((2, 3), 2), ((), None)]
        if target is R or not dim or HAS_ASYNC_OP  # of which the gradient was wrong
    ],
    *[Case("unshard", S(dim), target) for dim in (0, 1) for target in (R, I)],
    *[Case("reduce_scatter", source, S(dim)) for source in (P, V) for dim in (0, 1, -1)],
    Case("reduce_scatter", P, V, (None, 3)),
    Case("reduce_scatter", P, V, (3, None), {"scatter_dim": 1}),
    *[Case("all_to_all", S(i), S(j), (4, 8, 3)) for i, j in [(0, 1), (1, 0), (0, 0), (-2, 0), (1, 1)]],
    *[
        Case("all_to_all", V, V, shape, {"split_dim": split, "concat_dim": concat})
        for shape, split, concat in [
            ((None, 3), None, None),
            ((3, None), 1, 0),
            ((3, None, 2), 1, 2),
            ((None, 3, 2), 0, 2),
        ]
    ],
    *[
        Case("redistribute", source, target)
        for source, target in [(S(0), R), (S(1), I), (P, R), (P, I), (P, S(1)), (S(0), S(1)), (S(1), S(0))]
    ],
    # Results that are sent, and gradients that are reduced, in another dtype.
    Case("all_gather", S(0), R, (2, 3), IN_HALF, is_pending=True),
    Case("all_gather", S(1), I, (2, 3), {"op_dtype": torch.bfloat16}),
    Case("all_reduce", P, R, (4, 4), {"out_dtype": torch.float64}, is_pending=False),
    Case("reduce_scatter", P, S(0), (4, 4), {"op_dtype": torch.float64, "out_dtype": torch.float32}, False),
    Case(
        "all_gather", S(0), R, (2, 3), {"backward_options": {"op_dtype": torch.float32}}, True, torch.bfloat16
    ),
    Case("reduce_scatter", P, S(0), (8, 3), {}, True, torch.bfloat16),
    Case("reduce_scatter", P, S(0), (8, 3), {"out_dtype": torch.float32}, False, torch.bfloat16),
    Case("all_reduce", P, I, (8, 3), {}, True, torch.bfloat16),
    Case("all_to_all", S(0), S(1), (4, 8), {"out_dtype": torch.bfloat16}),
    Case("all_to_all", S(0), S(1), (4, 8), {"out_dtype": torch.float64}, False),
]


# Calls that send nothing in the forward pass.
LOCAL = [
    *[Case("convert", I, target, shape) for target, shape in [(R, (3, 2)), (S(0), (8, 2)), (V, (None, 2))]],
    *[Case("convert", R, target, shape) for target, shape in [(S(1), (3, 8)), (V, (None, 2)), (P, (3, 2))]],
    *[
        Case("convert", source, target, (3, 2), EXPERT)
        for source, target in [(R, I), (I, P), (V, P), (S(1), P)]
    ],
    *[Case("reinterpret", source, P, (3, 2), EXPERT) for source in (R, I, V)],
    *[Case("reinterpret", source, V, (3, 2), EXPERT) for source in (R, I)],
    Case("reinterpret", I, R, (3, 2), EXPERT),
    Case("reinterpret", R, I, (3, 2), EXPERT),
    Case("shard", I, S(0)),
    Case("shard", R, S(1)),
    *[Case("redistribute", source, target) for source, target in [(R, I), (I, R), (R, S(0)), (R, P), (I, P)]],
    *[Case("redistribute", source, P) for source in (S(0), S(1))],
    Case("invariant_to_replicate", I, R),
    Case(
        "convert", I, R, (3, 2), {"op_dtype": torch.bfloat16, "backward_options": {"op_dtype": torch.float32}}
    ),
    Case("convert", I, S(0), (8, 2), {"op_dtype": torch.bfloat16}),
]
TABLES = {"COLLECTIVES": COLLECTIVES, "LOCAL": LOCAL}


def sent_by_stock(cases: list[Case]) -> list[Case]:
    """Over NCCL stock raises for parts of a varying tensor along its later dims, also those of the gradient:
    they are not contiguous."""

    def is_refused(case: Case) -> bool:
        return case.function == "all_to_all" and case.source is V and any(case.options.values())

    return cases if device_type() == "cpu" else [case for case in cases if not is_refused(case)]


ERRORS = [
    Case("all_reduce", R, R),
    Case("all_reduce", P, V),
    Case("all_reduce", P, R, (8, 8), {"backward_options": {"unknown": 1}}),
    Case("all_reduce", P, R, dtype=torch.bfloat16),  # says nothing of the precision of the gradient
    Case("all_reduce", P, R, (4, 4), {"inplace": True, "op_dtype": torch.float64}),
    Case("all_gather", P, R),
    Case("all_gather", S(0), R, (8, 8), {"gather_dim": 1}),
    Case("all_gather", V, R, (8, 8), {"split_sizes": [4, 4]}),
    Case("all_gather", S(0), V),
    Case("all_gather", S(5), R),
    Case("reduce_scatter", I, V),
    Case("reduce_scatter", P, R),
    Case("reduce_scatter", P, S(0), (8, 8), {"scatter_dim": 1}),
    Case("all_to_all", S(0), S(1), (4, 3)),
    Case("all_to_all", P, V),
    Case("all_to_all", S(0), S(1), (8, 8), {"output_split_sizes": [4, 4]}),
    Case("redistribute", V, S(0)),
    Case("redistribute", R, S(7)),
    Case("convert", P, R),
    Case("convert", I, P),
    Case("reinterpret", V, R, (2, 2), EXPERT),
    Case("unshard", V, R),
    Case("shard", R, V),
]


def exchange_lists(outputs: list[Tensor], inputs: list[Tensor], group: Any = None) -> None:
    """``all_to_all`` of lists, by one of tensors."""
    received = torch.empty(sum(one.numel() for one in outputs), dtype=outputs[0].dtype)
    sent = torch.cat([one.flatten() for one in inputs])
    sizes = [one.numel() for one in outputs], [one.numel() for one in inputs]
    dist.all_to_all_single(received, sent, *sizes, group=group)
    for one, part in zip(outputs, received.split(sizes[0]), strict=True):
        one.copy_(part.view_as(one))


def with_lists_exchanged(rank: int, world: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Calls ``function``. The package sends lists, which gloo of older releases does not."""
    if is_supported("alltoall_"):
        return function(rank, world, *args)
    own, dist.all_to_all = dist.all_to_all, exchange_lists
    try:
        return function(rank, world, *args)
    finally:
        dist.all_to_all = own


def run(function: Callable[..., None], world: int, *args: Any, timeout: float = 60) -> None:
    run_ranks(with_lists_exchanged, world, function, args, timeout=timeout)


on_ranks = functools.partial(ranks.on_ranks, run=run)


def call(case: Case, x: Tensor, axis: Any, **more: Any) -> Any:
    function = getattr(spmd, case.function)
    options = {**case.options, **more}
    if case.function == "invariant_to_replicate":
        return function(x, axis, **options)
    return function(x, axis, src=case.source, dst=case.target, **options)


def sample(rank: int, world: int, case: Case) -> Tensor:
    """Returns small whole numbers, whose sums every dtype holds."""
    shape = [world if size is None else size for size in case.shape]
    same = case.source in (R, I)
    generator = torch.Generator(device_type()).manual_seed(5 if same else 7 + rank)
    return torch.randint(-3, 4, shape, generator=generator).to(case.dtype)


def outcome(rank: int, world: int, case: Case, axis: Any, **more: Any) -> tuple[Any, ...]:
    """Returns if the result was pending, the result, and the gradients of two passes, of which the second
    differentiates the first."""
    leaf = sample(rank, world, case).requires_grad_()
    y = call(case, leaf * 1, axis, **more)
    is_pending = funcol.is_pending(y)
    value = y.detach().clone()
    weights = torch.arange(1, y.numel() + 1).remainder(3).add(1).view(y.shape).to(y.dtype)
    (first,) = torch.autograd.grad(y, leaf, weights)
    return is_pending, value, first + 0


def second_order(rank: int, world: int, case: Case, axis: Any) -> Tensor:
    leaf = sample(rank, world, case).requires_grad_()
    y = call(case, leaf * leaf, axis)
    (first,) = torch.autograd.grad((y * y).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    return second + 0


def same(ours: Tensor, theirs: Tensor, case: Case | str = "") -> None:
    """Strides count, too: the order of later sums depends on them."""
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=0, check_stride=True, msg=lambda text: f"{case}: {text}"
    )


def error_of(program: Callable[[], object]) -> tuple[type, str] | None:
    try:
        program()
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    return None
