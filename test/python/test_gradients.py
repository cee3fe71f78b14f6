"""Gradients of every out-of-place collective: against finite differences over all ranks, and stock."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from differential import sample, world_group
from ranks import run_ranks
from torch import Tensor

import funcol

Function = Callable[[Tensor], Tensor]


def splits(world: int) -> list[int]:
    """Uneven sizes, one of them 0 from three ranks on: 1, 3, 0, 2, ..."""
    return [[1, 3, 0, 2][rank % 4] for rank in range(world)]


def _coalesced(index: int, result: list[Tensor]) -> Tensor:
    return result[index]


# name: (shape of the input on a rank of a world, the function of the input)
Case = tuple[Callable[[int, int], tuple[int, ...]], Callable[[Tensor, int], Tensor]]


def _same(*shape: int) -> Callable[[int, int], tuple[int, ...]]:
    return lambda rank, world: shape


LINEAR: dict[str, Case] = {
    "all_reduce sum": (_same(2, 3), lambda x, w: funcol.all_reduce(x, "sum", world_group())),
    "all_reduce avg": (_same(2, 3), lambda x, w: funcol.all_reduce(x, "avg", world_group())),
    "all_reduce sum, 0-dim": (_same(), lambda x, w: funcol.all_reduce(x, "sum", world_group())),
    "all_reduce sum, empty": (_same(0, 3), lambda x, w: funcol.all_reduce(x, "sum", world_group())),
    "all_reduce sum, transposed": (_same(2, 3), lambda x, w: funcol.all_reduce(x.t(), "sum", world_group())),
    "all_gather dim 0": (_same(2, 3), lambda x, w: funcol.all_gather_tensor(x, 0, world_group())),
    "all_gather dim 1": (_same(2, 3), lambda x, w: funcol.all_gather_tensor(x, 1, world_group())),
    "all_gather last dim": (_same(2, 1, 2), lambda x, w: funcol.all_gather_tensor(x, -1, world_group())),
    "all_gather 0-dim": (_same(), lambda x, w: funcol.all_gather_tensor(x, 0, world_group())),
    "all_gather uneven dim 0": (
        lambda rank, world: (splits(world)[rank], 2),
        lambda x, w: funcol.all_gather_tensor(x, 0, world_group(), split_sizes=splits(w)),
    ),
    "all_gather uneven dim 1": (
        lambda rank, world: (2, splits(world)[rank]),
        lambda x, w: funcol.all_gather_tensor(x, 1, world_group(), split_sizes=splits(w)),
    ),
    "reduce_scatter sum dim 0": (
        _same(6, 1),
        lambda x, w: funcol.reduce_scatter_tensor(x, "sum", 0, world_group()),
    ),
    "reduce_scatter sum dim 1": (
        _same(2, 6),
        lambda x, w: funcol.reduce_scatter_tensor(x, "sum", 1, world_group()),
    ),
    "reduce_scatter avg dim 1": (
        _same(1, 6),
        lambda x, w: funcol.reduce_scatter_tensor(x, "avg", 1, world_group()),
    ),
    "reduce_scatter sum uneven": (
        lambda rank, world: (2, sum(splits(world))),
        lambda x, w: funcol.reduce_scatter_tensor(x, "sum", 1, world_group(), split_sizes=splits(w)),
    ),
    "reduce_scatter avg uneven": (
        lambda rank, world: (sum(splits(world)),),
        lambda x, w: funcol.reduce_scatter_tensor(x, "avg", 0, world_group(), split_sizes=splits(w)),
    ),
    "all_to_all equal": (_same(6, 2), lambda x, w: funcol.all_to_all_single(x, None, None, world_group())),
    "all_to_all splits": (
        # rank r sends r rows to itself and s + 1 rows to any other rank s
        lambda rank, world: (sum(rank if s == rank else s + 1 for s in range(world)), 2),
        lambda x, w: funcol.all_to_all_single(
            x,
            [dist.get_rank() + (0 if s == dist.get_rank() else 1) for s in range(w)],
            [dist.get_rank() if s == dist.get_rank() else s + 1 for s in range(w)],
            world_group(),
        ),
    ),
    "broadcast": (_same(2, 3), lambda x, w: funcol.broadcast(x, w - 1, world_group())),
    "permute ring": (
        _same(2, 3),
        lambda x, w: funcol.permute_tensor(x, [(r + 1) % w for r in range(w)], world_group()),
    ),
    "permute of 0-dim tensors": (
        _same(),
        lambda x, w: funcol.permute_tensor(x, [(r + 1) % w for r in range(w)], world_group()),
    ),
    "permute all to one rank": (
        _same(2, 2),
        lambda x, w: funcol.permute_tensor(x, [0] * w, world_group()),
    ),
    "permute from the first rank alone": (
        _same(2, 2),
        lambda x, w: funcol.permute_tensor(x, [w - 1], world_group()),
    ),
    "reduce sum": (_same(2, 3), lambda x, w: funcol.reduce(x, "sum", w - 1, world_group())),
    "reduce avg": (_same(2, 3), lambda x, w: funcol.reduce(x, "avg", 0, world_group())),
    "scatter": (_same(6, 2), lambda x, w: funcol.scatter(x, w - 1, 0, world_group())),
    "scatter uneven dim 1": (
        lambda rank, world: (2, sum(splits(world))),
        lambda x, w: funcol.scatter(x, 0, 1, world_group(), split_sizes=splits(w)),
    ),
    "gather": (_same(2, 3), lambda x, w: funcol.gather(x, w - 1, 0, world_group())),
    "gather uneven dim 1": (
        lambda rank, world: (2, splits(world)[rank]),
        lambda x, w: funcol.gather(x, 0, -1, world_group(), split_sizes=splits(w)),
    ),
    "all_reduce_coalesced": (
        _same(2, 3),
        lambda x, w: torch.cat(
            [y.flatten() for y in funcol.all_reduce_coalesced([x, 2 * x[0]], "sum", world_group())]
        ),
    ),
    "all_reduce_coalesced avg, one result unused": (
        _same(2, 3),
        lambda x, w: _coalesced(1, funcol.all_reduce_coalesced([3 * x, 2 * x], "avg", world_group())),
    ),
    "all_gather_into_tensor_coalesced": (
        _same(2, 3),
        lambda x, w: torch.cat(
            [y.flatten() for y in funcol.all_gather_into_tensor_coalesced([x, x[0, 0]], world_group())]
        ),
    ),
    "all_gather_into_tensor_coalesced of two dtypes": (
        _same(2, 3),
        lambda x, w: torch.cat(
            [
                y.flatten().double()
                for y in funcol.all_gather_into_tensor_coalesced([x, x.to(torch.complex128)], world_group())
            ]
        ),
    ),
    "reduce_scatter_tensor_coalesced": (
        _same(6, 6),
        lambda x, w: torch.cat(
            [
                y.flatten()
                for y in funcol.reduce_scatter_tensor_coalesced([x, 2 * x], "avg", [0, 1], world_group())
            ]
        ),
    ),
    "wait_tensor": (
        _same(2, 3),
        lambda x, w: funcol.wait_tensor(funcol.all_reduce(x, "sum", world_group())),
    ),
    "through views of a pending result": (
        _same(2, 3),
        lambda x, w: funcol.all_reduce(x, "sum", world_group()).t().reshape(-1)[1:].view(-1, 1),
    ),
    "torch.ops.funcol.all_reduce": (
        _same(2, 3),
        lambda x, w: torch.ops.funcol.all_reduce(x, "sum", world_group().group_name),
    ),
    "torch.ops.funcol.all_gather_into_tensor": (
        _same(2, 3),
        lambda x, w: torch.ops.funcol.all_gather_into_tensor(x, w, world_group().group_name),
    ),
    "torch.ops.funcol.reduce_scatter_tensor": (
        _same(6, 3),
        lambda x, w: torch.ops.funcol.reduce_scatter_tensor(x, "avg", w, world_group().group_name),
    ),
    "torch.ops.funcol.broadcast": (
        _same(2, 3),
        lambda x, w: torch.ops.funcol.broadcast(x, 0, world_group().group_name),
    ),
}

NONLINEAR: dict[str, Case] = {
    "all_reduce max": (_same(2, 3), lambda x, w: funcol.all_reduce(x, "max", world_group())),
    "all_reduce min": (_same(2, 3), lambda x, w: funcol.all_reduce(x, "min", world_group())),
    "all_reduce product": (_same(2, 3), lambda x, w: funcol.all_reduce(x, "product", world_group())),
    "reduce_scatter max": (
        _same(6, 2),
        lambda x, w: funcol.reduce_scatter_tensor(x, "max", 0, world_group()),
    ),
    "reduce_scatter max dim 1": (
        _same(2, 6),
        lambda x, w: funcol.reduce_scatter_tensor(x, "max", 1, world_group()),
    ),
    "reduce_scatter product": (
        _same(6),
        lambda x, w: funcol.reduce_scatter_tensor(x, "product", 0, world_group()),
    ),
    "reduce_scatter min uneven": (
        lambda rank, world: (sum(splits(world)),),
        lambda x, w: funcol.reduce_scatter_tensor(x, "min", 0, world_group(), split_sizes=splits(w)),
    ),
    "reduce max": (_same(2, 3), lambda x, w: funcol.reduce(x, "max", w - 1, world_group())),
    "reduce product": (_same(3), lambda x, w: funcol.reduce(x, "product", 0, world_group())),
    "all_reduce_coalesced min": (
        _same(2, 3),
        lambda x, w: torch.cat(
            [y.flatten() for y in funcol.all_reduce_coalesced([x, x[0] - 1], "min", world_group())]
        ),
    ),
    "reduce_scatter_tensor_coalesced max": (
        _same(6, 6),
        lambda x, w: torch.cat(
            [
                y.flatten()
                for y in funcol.reduce_scatter_tensor_coalesced([x, 2 - x], "max", [0, 1], world_group())
            ]
        ),
    ),
}
CASES = LINEAR | NONLINEAR

each_world = pytest.mark.parametrize("world", [1, 2, 3])


def total(local: Tensor) -> float:
    """The sum of ``local`` over all ranks, by c10d."""
    summed = local.detach().clone()
    dist.all_reduce(summed)
    return float(summed)


def finite_differences(function: Function, x: Tensor, weights: Tensor, rank: int, world: int) -> Tensor:
    """d/dx of the sum over all ranks of <weights, function(x)>, one element of one rank's x at a time."""
    step = 1e-6
    gradient = torch.zeros_like(x)
    for other in range(world):
        count = torch.tensor(x.numel())
        dist.broadcast(count, other)
        for index in range(int(count)):
            values = []
            for sign in (1, -1):
                moved = x.detach().clone()
                if other == rank:
                    moved.view(-1)[index] += sign * step
                values.append(total((function(moved).detach() * weights).sum()))
            if other == rank:
                gradient.view(-1)[index] = (values[0] - values[1]) / (2 * step)
    return gradient


def case_on(rank: int, world: int, name: str) -> tuple[Function, Tensor, Tensor]:
    """The case's function, its input and a weight for each element of the result."""
    shape, function = CASES[name]
    x = sample(rank, shape(rank, world), torch.float64)
    weights = sample(rank + 10, function(x, world).shape, torch.float64)
    return lambda x: function(x, world), x, weights


def agrees_with_finite_differences(rank: int, world: int, name: str) -> None:
    function, x, weights = case_on(rank, world, name)
    x.requires_grad_()
    result = function(x)
    assert result.requires_grad
    (actual,) = torch.autograd.grad(result, x, weights)
    expected = finite_differences(function, x, weights, rank, world)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


@each_world
@pytest.mark.parametrize("name", CASES)
def test_a_gradient_agrees_with_finite_differences_over_all_ranks(world: int, name: str) -> None:
    run_ranks(agrees_with_finite_differences, world, name)


def differentiates_twice(rank: int, world: int, name: str) -> None:
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


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_collective_can_be_differentiated_twice(name: str) -> None:
    run_ranks(differentiates_twice, 2, name)


def product_twice(rank: int, world: int) -> None:
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


def test_a_product_can_be_differentiated_twice() -> None:
    run_ranks(product_twice, 2)


def product_of_zeros(rank: int, world: int) -> None:
    x = torch.tensor([[0.0, 2.0, 0.0], [5.0, 0.0, 0.0]][rank], requires_grad=True)
    funcol.all_reduce(x, "product", world_group()).sum().backward()
    assert x.grad is not None
    # Two ranks sum: each has a gradient of 1, so the factor of the other rank counts twice.
    assert x.grad.tolist() == [[10.0, 0.0, 0.0], [0.0, 4.0, 0.0]][rank]


def test_the_gradient_of_a_product_is_right_where_factors_are_zero() -> None:
    run_ranks(product_of_zeros, 2)


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


def multiplies_by_its_own_factor(rank: int, world: int) -> None:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    group = dist.new_group(list(range(world)), backend="fake")  # its sum over the ranks is what this one has
    factor = 3.0 + rank
    x = torch.ones(2, requires_grad=True)
    premul_sum = dist._make_nccl_premul_sum(factor)
    funcol.wait_tensor(funcol.all_reduce(x, premul_sum, group)).backward(torch.tensor([1.0, 2.0]))
    assert x.grad is not None
    assert x.grad.tolist() == [factor, 2 * factor]


def test_premul_sum_multiplies_the_summed_gradient_by_the_factor_of_the_rank() -> None:
    run_ranks(multiplies_by_its_own_factor, 2)


# The calls that stock differentiates in every minor.
SHARED: dict[str, Callable[[Any, Tensor, int], Any]] = {
    "all_reduce": lambda api, x, w: api.all_reduce(x, "sum", world_group()),
    "all_gather dim 0": lambda api, x, w: api.all_gather_tensor(x, 0, world_group()),
    "all_gather dim 1": lambda api, x, w: api.all_gather_tensor(x, 1, world_group()),
    "reduce_scatter dim 0": lambda api, x, w: api.reduce_scatter_tensor(x, "sum", 0, world_group()),
    "reduce_scatter dim 1": lambda api, x, w: api.reduce_scatter_tensor(x, "sum", 1, world_group()),
    "all_to_all": lambda api, x, w: api.all_to_all_single(x, None, None, world_group()),
    "permute": lambda api, x, w: api.permute_tensor(
        x.flatten(), [(r + 1) % w for r in range(w)], world_group()
    ),
    "all_reduce_coalesced": lambda api, x, w: api.all_reduce_coalesced([x, x[:1]], "sum", world_group()),
    "all_gather_coalesced": lambda api, x, w: api.all_gather_into_tensor_coalesced([x, x[:1]], world_group()),
    "reduce_scatter_coalesced": lambda api, x, w: api.reduce_scatter_tensor_coalesced(
        [x, 2 * x], "sum", [0, 1], world_group()
    ),
}
if hasattr(stock, "_is_reduceop_supported"):
    SHARED |= {
        f"all_reduce {op}": lambda api, x, w, op=op: api.all_reduce(x, op, world_group())
        for op in ("avg", "min", "max")
    }


def gradient_of(api: Any, call: str, x: Tensor, world: int) -> Tensor:
    x = x.clone().requires_grad_()
    results = SHARED[call](api, x, world)
    loss = torch.zeros((), dtype=x.dtype)
    for result in [results] if isinstance(results, Tensor) else results:
        # Views first, so that stock's tensors take the same path.
        loss = loss + (result * torch.arange(1, result.numel() + 1).view(result.shape)).sum()
    loss.backward()
    assert x.grad is not None
    return x.grad


def equals_stock(rank: int, world: int, call: str, dtype: torch.dtype) -> None:
    x = sample(rank, (6, 6), dtype)
    actual = gradient_of(funcol, call, x, world)
    torch.testing.assert_close(actual, gradient_of(stock, call, x, world), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("call", SHARED)
def test_a_gradient_is_that_of_stock(world: int, call: str) -> None:
    run_ranks(equals_stock, world, call, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("call", ["all_reduce", "all_gather dim 1", "reduce_scatter dim 0"])
def test_a_gradient_is_that_of_stock_in_each_dtype(call: str, dtype: torch.dtype) -> None:
    run_ranks(equals_stock, 2, call, dtype)


ASYNCHRONOUS = [
    "all_reduce sum",
    "all_reduce avg",
    "all_gather dim 0",
    "all_gather dim 1",
    "reduce_scatter sum dim 1",
    "reduce_scatter avg dim 1",
    "all_to_all equal",
    "broadcast",
    "permute ring",
    "reduce sum",
]


def leaves_a_pending_gradient(rank: int, world: int, name: str) -> None:
    function, x, weights = case_on(rank, world, name)
    x.requires_grad_()
    result = function(x)
    assert funcol.is_pending(result)
    result.backward(weights)
    assert x.grad is not None
    assert funcol.is_pending(x.grad)
    pending = x.grad
    expected = finite_differences(function, x, weights, rank, world)
    torch.testing.assert_close(pending, expected, rtol=1e-6, atol=1e-7)
    assert not funcol.is_pending(x.grad)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_the_collective_of_the_backward_pass_is_asynchronous_too(name: str) -> None:
    run_ranks(leaves_a_pending_gradient, 2, name)


def records_by_name_only(rank: int, world: int) -> None:
    group = dist.new_group(list(range(world)))
    x = torch.ones(2, requires_grad=True)
    y = funcol.wait_tensor(funcol.all_reduce(x, "sum", group))
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="all_reduce: no process group is registered under the name"):
        y.sum().backward()


def test_backward_through_a_group_that_is_gone_is_refused() -> None:
    run_ranks(records_by_name_only, 2)


def backward_twice(rank: int, world: int, retain: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    y = funcol.all_reduce_coalesced([x, x * 2], "max", world_group())[0]
    y.sum().backward(retain_graph=retain)
    if retain:
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2.0, 2.0]
    else:
        with pytest.raises(RuntimeError, match="second time"):
            y.sum().backward()


@pytest.mark.parametrize("retain", [True, False])
def test_a_graph_that_saved_values_runs_backward_twice_only_if_it_is_retained(retain: bool) -> None:
    run_ranks(backward_twice, 2, retain)


def compiled_gradient(rank: int, world: int, name: str, backend: str) -> None:
    function, x, weights = case_on(rank, world, name)
    expected = x.clone().requires_grad_()
    function(expected).backward(weights)
    actual = x.clone().requires_grad_()
    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(actual).backward(weights)
    torch.testing.assert_close(actual.grad, expected.grad)


COMPILED = [
    "all_reduce sum",
    "all_reduce avg",
    "all_reduce max",
    "all_reduce product",
    "all_gather dim 1",
    "reduce_scatter avg dim 1",
    "reduce_scatter max dim 1",
    "all_to_all equal",
    "broadcast",
    "permute ring",
    "reduce sum",
    "reduce max",
    "scatter",
    "scatter uneven dim 1",
    "gather",
    "gather uneven dim 1",
    "all_gather uneven dim 1",
    "reduce_scatter sum uneven",
    "all_reduce_coalesced min",
    "reduce_scatter_tensor_coalesced max",
    "torch.ops.funcol.broadcast",
]


@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_collective_has_the_gradient_of_eager(name: str) -> None:
    run_ranks(compiled_gradient, 2, name, "aot_eager", timeout=120)


def gradient_by_a_compiled_engine(rank: int, world: int, name: str) -> None:
    function, x, weights = case_on(rank, world, name)
    expected = x.clone().requires_grad_()
    function(expected).backward(weights)
    actual = x.clone().requires_grad_()
    result = function(actual)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        result.backward(weights)
    torch.testing.assert_close(actual.grad, expected.grad)


@pytest.mark.parametrize(
    "name",
    [
        "all_reduce sum",
        "all_reduce max",
        "all_gather dim 1",
        "gather",
        "broadcast",
        "all_reduce_coalesced avg, one result unused",
        "all_reduce_coalesced min",
        "all_gather_into_tensor_coalesced",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor_coalesced max",
    ],
)
def test_compiled_autograd_runs_the_backward_pass(name: str) -> None:
    run_ranks(gradient_by_a_compiled_engine, 2, name, timeout=120)
