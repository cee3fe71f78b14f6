"""Gradients of the collectives beside those of stock: values, pending results, compiled regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from differential import sample, world_group
from gradient_cases import case_on, finite_differences
from ranks import on_ranks, run_ranks
from torch import Tensor

import funcol

ON_DEVICES = True

# The calls that stock differentiates in every release.
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


@pytest.mark.parametrize("name", ASYNCHRONOUS)
@on_ranks(2)
def test_the_collective_of_the_backward_pass_is_asynchronous_too(rank: int, world: int, name: str) -> None:
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


@on_ranks(2)
def test_backward_through_a_group_that_is_gone_is_refused(rank: int, world: int) -> None:
    group = dist.new_group(list(range(world)))
    x = torch.ones(2, requires_grad=True)
    y = funcol.wait_tensor(funcol.all_reduce(x, "sum", group))
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match="all_reduce: no process group is registered under the name"):
        y.sum().backward()


@pytest.mark.parametrize("retain", [True, False])
@on_ranks(2)
def test_a_graph_that_saved_values_runs_backward_twice_only_if_it_is_retained(
    rank: int, world: int, retain: bool
) -> None:
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_collective_has_the_gradient_of_eager(name: str) -> None:
    run_ranks(compiled_gradient, 2, name, "aot_eager", timeout=120)


@pytest.mark.sampled(3)
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
@on_ranks(2, timeout=120)
def test_compiled_autograd_runs_the_backward_pass(rank: int, world: int, name: str) -> None:
    function, x, weights = case_on(rank, world, name)
    expected = x.clone().requires_grad_()
    function(expected).backward(weights)
    actual = x.clone().requires_grad_()
    result = function(actual)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        result.backward(weights)
    torch.testing.assert_close(actual.grad, expected.grad)
