"""The package spmd_types on PyTorch alone and under funcol.install(): values, gradients and errors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from differential import world_group
from spmd_cases import (
    COLLECTIVES,
    ERRORS,
    HAS_ASYNC_OP,
    LOCAL,
    TABLES,
    WORLDS,
    Case,
    R,
    S,
    V,
    call,
    error_of,
    on_ranks,
    outcome,
    run,
    same,
    sample,
    second_order,
    sent_by_stock,
    spmd,
)
from torch import Tensor

import funcol

ON_DEVICES = True

# Values and gradients


def later(case: Case) -> dict[str, Any]:
    """Returns options for pending results, in both passes unless the case has options for the second."""
    options: dict[str, Any] = {"async_op": True}
    if "backward_options" not in case.options and case.dtype is torch.float32:
        options["backward_options"] = {"async_op": True}
    return options


def is_as_on_stock(rank: int, world: int, table: str, function: str) -> None:
    cases = [case for case in sent_by_stock(TABLES[table]) if case.function == function]
    group = world_group()
    theirs = [outcome(rank, world, case, group) for case in cases]
    sends = table == "COLLECTIVES"
    with funcol.installed():
        for case, (_, value, gradient) in zip(cases, theirs, strict=True):
            is_pending, ours, our_gradient = outcome(rank, world, case, group)
            same(ours, value, case)
            same(our_gradient, gradient, case)
            assert is_pending == (sends and case.is_pending), str(case)
            if HAS_ASYNC_OP and sends:
                _, ours, our_gradient = outcome(rank, world, case, group, **later(case))
                same(ours, value, case)
                same(our_gradient, gradient, case)


def functions_of(cases: list[Case]) -> list[str]:
    return list(dict.fromkeys(case.function for case in cases))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("function", functions_of(COLLECTIVES))
def test_a_collective_is_as_on_stock_and_pending(function: str, world: int) -> None:
    run(is_as_on_stock, world, "COLLECTIVES", function)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("function", functions_of(LOCAL))
def test_a_change_that_sends_nothing_is_as_on_stock(function: str, world: int) -> None:
    run(is_as_on_stock, world, "LOCAL", function)


@pytest.mark.parametrize("table", ["COLLECTIVES", "LOCAL"])
@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_second_derivatives_are_those_of_stock(rank: int, world: int, table: str) -> None:
    cases = [
        case
        for case in TABLES[table]
        if not case.options and case.dtype is torch.float32 and 0 not in case.shape
    ]
    theirs = [second_order(rank, world, case, world_group()) for case in cases]
    with funcol.installed():
        for case, value in zip(cases, theirs, strict=True):
            same(second_order(rank, world, case, world_group()), value, case)


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_parts_of_different_sizes(rank: int, world: int) -> None:
    sizes = [r + 1 for r in range(world)]
    total = sum(sizes)
    group = world_group()

    def scattered() -> tuple[Tensor, ...]:
        x = torch.arange(total * 2.0).view(total, 2).add(rank).requires_grad_()
        y = spmd.reduce_scatter(x * 1, group, dst=S(0), split_sizes=sizes)
        return (y.detach() + 0,)

    def exchanged() -> tuple[Tensor, ...]:
        rows = world * (rank + 1)
        x = torch.arange(rows * 2.0).view(rows, 2).add(100 * rank).requires_grad_()
        y = spmd.all_to_all(
            x * 1,
            group,
            src=S(0),
            dst=S(0),
            output_split_sizes=sizes,
            input_split_sizes=[rank + 1] * world,
        )
        weights = torch.arange(float(y.numel())).view(y.shape)
        value = y.detach() + 0
        return value, torch.autograd.grad(y, x, weights)[0] + 0

    theirs = scattered()
    with funcol.installed():
        for one, other in zip(scattered(), theirs, strict=True):
            same(one, other)
    # gloo neither exchanges nor gathers parts of different sizes in a list.
    with funcol.installed():
        received, gradient = exchanged()
    sent = [torch.arange(2.0 * world * (r + 1)).view(-1, 2).add(100 * r).split(r + 1) for r in range(world)]
    same(received, torch.cat([parts[rank] for parts in sent]))
    weights = [torch.arange(2.0 * total).view(total, 2).split(sizes)[rank] for _ in range(world)]
    same(gradient, torch.cat(weights))
    whole = torch.arange(total * 2.0).view(total, 2)
    with funcol.installed():
        x = whole.split(sizes)[rank].clone().requires_grad_()
        y = spmd.all_gather(x * 1, group, src=S(0), dst=R, split_sizes=sizes)
        assert funcol.is_pending(y)
        same(y + 0, whole)
        (gradient,) = torch.autograd.grad(y, x, whole)
        same(gradient + 0, whole.split(sizes)[rank] * world)


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_the_input_may_be_overwritten_after_a_call_without_async_op(rank: int, world: int) -> None:
    cases = [case for case in COLLECTIVES if not case.options and case.dtype is torch.float32]
    theirs = [call(case, sample(rank, world, case), world_group()) + 0 for case in cases]
    with funcol.installed():
        for case, value in zip(cases, theirs, strict=True):
            x = sample(rank, world, case)
            y = call(case, x, world_group())
            x.fill_(1e6)
            same(y + 0, value, case)


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_an_all_to_all_is_one_exchange(rank: int, world: int) -> None:
    with funcol.installed():
        for x, types, options in [
            (torch.ones(4, 8), (S(0), S(1)), {}),
            (torch.ones(world, 3), (V, V), {}),
            (torch.ones(8, 3), (S(0), S(0)), {"output_split_sizes": [8 // world] * world}),
        ]:
            before = Counter(funcol.unwaited_collectives())
            y = spmd.all_to_all(x, world_group(), src=types[0], dst=types[1], **options)
            assert funcol.is_pending(y)
            assert Counter(funcol.unwaited_collectives()) - before == {"all_to_all_single": 1}
            y + 0


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_all_reduce_in_place(rank: int, world: int) -> None:
    x = torch.full((3,), float(rank))
    with funcol.installed():
        assert spmd.all_reduce(x, world_group(), dst=R, inplace=True) is not None
    assert x.tolist() == [float(sum(range(world)))] * 3


def error_of_case(rank: int, world: int, case: Case) -> tuple[type, str] | None:
    x = sample(rank, world, case).requires_grad_() * 1
    return error_of(lambda: call(case, x, world_group()))


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_errors_are_those_of_stock(rank: int, world: int) -> None:
    theirs = [error_of_case(rank, world, case) for case in ERRORS]
    with funcol.installed():
        ours = [error_of_case(rank, world, case) for case in ERRORS]
    for case, one, other in zip(ERRORS, ours, theirs, strict=True):
        assert one == other, str(case)
    with funcol.installed():
        assert error_of(lambda: spmd.all_reduce(torch.ones(2), "tp", dst=R)) is not None
        transposed = torch.ones(2, 3).t()
        error = error_of(lambda: spmd.all_reduce(transposed, world_group(), dst=R))
    assert error == (AssertionError, "all_reduce input must be contiguous")
