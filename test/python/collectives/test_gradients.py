"""Gradients of every out-of-place collective, against finite differences over all ranks."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from differential import sample, world_group
from gradient_cases import CASES, LINEAR, case_on, finite_differences
from ranks import on_ranks, run_ranks
from torch import Tensor

import funcol

ON_DEVICES = True

each_world = pytest.mark.parametrize("world", [1, 2, 3])


@pytest.mark.sampled(4)
@each_world
@pytest.mark.parametrize("name", CASES)
@on_ranks()
def test_a_gradient_agrees_with_finite_differences_over_all_ranks(rank: int, world: int, name: str) -> None:
    function, x, weights = case_on(rank, world, name)
    x.requires_grad_()
    result = function(x)
    assert result.requires_grad
    (actual,) = torch.autograd.grad(result, x, weights)
    expected = finite_differences(function, x, weights, rank, world)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", LINEAR)
@on_ranks(2)
def test_a_linear_collective_can_be_differentiated_twice(rank: int, world: int, name: str) -> None:
    function, x, weights = case_on(rank, world, name)
    x.requires_grad_()

    def backward(v: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(function(x), x, v, create_graph=True)
        return gradient

    second = sample(rank + 20, x.shape, torch.float64)
    weights.requires_grad_()
    (actual,) = torch.autograd.grad(backward(weights), weights, second)
    expected = finite_differences(lambda v: backward(v.requires_grad_()), weights, second, rank, world)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_a_product_can_be_differentiated_twice(rank: int, world: int) -> None:
    function, x, weights = case_on(rank, world, "all_reduce product")

    def backward(x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (gradient,) = torch.autograd.grad(function(x), x, weights, create_graph=True)
        return gradient

    second = sample(rank + 20, x.shape, torch.float64)
    point = x.clone().requires_grad_()
    (actual,) = torch.autograd.grad(backward(point), point, second)
    expected = finite_differences(backward, x, second, rank, world)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_the_gradient_of_a_product_is_right_where_factors_are_zero(rank: int, world: int) -> None:
    x = torch.tensor([[0.0, 2.0, 0.0], [5.0, 0.0, 0.0]][rank], requires_grad=True)
    funcol.all_reduce(x, "product", world_group()).sum().backward()
    assert x.grad is not None
    # Two ranks sum: each has a gradient of 1, so the factor of the other rank counts twice.
    assert x.grad.tolist() == [[10.0, 0.0, 0.0], [0.0, 4.0, 0.0]][rank]


def extremum(rank: int, world: int, reduce_op: str) -> list[float]:
    nan = float("nan")
    rows = [[1.0, 5.0, 2.0, nan], [1.0, 4.0, 2.0, nan], [1.0, 5.0, 3.0, nan]]
    x = torch.tensor(rows[rank], requires_grad=True)
    funcol.all_reduce(x, reduce_op, world_group()).sum().backward()
    assert x.grad is not None
    eager = torch.tensor(rows, requires_grad=True)
    # ATen's full reduction shares ties and routes NaN; the three ranks' gradients of 1 add up to 3.
    sum(3 * (column.max() if reduce_op == "max" else column.min()) for column in eager.unbind(1)).backward()
    assert eager.grad is not None
    torch.testing.assert_close(x.grad, eager.grad[rank])
    return x.grad.tolist()  # type: ignore[no-any-return]


def test_ranks_that_tie_for_the_maximum_share_its_gradient_and_nan_counts_as_eager_counts_it() -> None:
    assert run_ranks(extremum, 3, "max") == [[1, 1.5, 0, 1], [1, 0, 0, 1], [1, 1.5, 3, 1]]


def test_ranks_that_tie_for_the_minimum_share_its_gradient_and_nan_counts_as_eager_counts_it() -> None:
    assert run_ranks(extremum, 3, "min") == [[1, 0, 1.5, 1], [1, 3, 1.5, 1], [1, 0, 0, 1]]


@on_ranks(2)
def test_premul_sum_multiplies_the_summed_gradient_by_the_factor_of_the_rank(rank: int, world: int) -> None:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    group = dist.new_group(list(range(world)), backend="fake")  # its sum over the ranks is what this one has
    factor = 3.0 + rank
    x = torch.ones(2, requires_grad=True)
    premul_sum = dist._make_nccl_premul_sum(factor)
    funcol.wait_tensor(funcol.all_reduce(x, premul_sum, group)).backward(torch.tensor([1.0, 2.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [factor, 2 * factor]
