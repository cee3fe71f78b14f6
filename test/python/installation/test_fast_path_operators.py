"""Calls of DTensor's operators that C++ serves under funcol.install(), beside PyTorch's results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from programs import mesh_of
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from versions import TORCH

import funcol
from funcol.installation import forget_operator_counts, operator_counts

aten = torch.ops.aten

CALLS: dict[str, tuple[Any, Callable[[DTensor, DTensor], object]]] = {
    "two tensors": (aten.add.Tensor, lambda x, y: x + y),
    "a number": (aten.mul.Tensor, lambda x, y: x * 2.5),
    "a view": (aten.t.default, lambda x, y: x.t()),
    "a view whose sizes become local": (aten.view.default, lambda x, y: x.view(8, 2, 2)),
    "in place": (aten.add_.Tensor, lambda x, y: x.detach().add_(1.0)),
    "a list of results": (aten.split.Tensor, lambda x, y: x.split(2, 1)),
    "a list of arguments": (aten.cat.default, lambda x, y: torch.cat([x, y], 1)),
    "a list in place": (aten._foreach_add_.Scalar, lambda x, y: torch._foreach_add_([x.detach(), y], 1.0)),
    "lists in and out": (aten._foreach_mul.Scalar, lambda x, y: torch._foreach_mul([x, y], 2.0)),
    "several results": (
        aten.native_layer_norm.default,
        lambda x, y: torch.nn.functional.layer_norm(x, (4,)),
    ),
    "an argument that moves": (
        aten.add.Tensor,
        lambda x, y: x + replicated(y),
    ),
    "in place, of a tensor that moves": (aten.add_.Tensor, lambda x, y: x.detach().add_(replicated(y))),
    "norms that stay partial": (aten._foreach_norm.Scalar, lambda x, y: torch._foreach_norm([x, y], 2)),
    "a list of partial norms": (
        aten.stack.default,
        lambda x, y: torch.stack(torch._foreach_norm([x, y], 2)),
    ),
    "norms, one of which is not partial": (
        aten.stack.default,
        lambda x, y: torch.stack(torch._foreach_norm([x, replicated(y)], 3)),
    ),
    "a norm of partial norms": (
        aten.linalg_vector_norm.default,
        lambda x, y: torch.linalg.vector_norm(torch.stack(torch._foreach_norm([x, replicated(y)], 3)), 3),
    ),
    "text": (aten.div.Tensor_mode, lambda x, y: torch.div(x, 3.0, rounding_mode="floor")),
    "a dtype": (aten.sum.default, lambda x, y: x.sum(dtype=torch.float64)),
    "a missing tensor": (aten.clamp.Tensor, lambda x, y: torch.clamp(x, None, y)),
    "a scalar tensor": (aten.mul.Tensor, lambda x, y: x * x.to_local().new_tensor(2.0)),
    "a tensor that all ranks have": (aten.add.Tensor, lambda x, y: with_replicated(x, lambda one: x + one)),
    "a tensor that all ranks have and cut": (
        aten.add.Tensor,
        lambda x, y: with_replicated(x, lambda one: x + one, 8, 4),
    ),
    "a list with such tensors": (
        aten.cat.default,
        lambda x, y: with_replicated(x, lambda one: torch.cat([x, one, y]), 8, 4),
    ),
    "an out argument": (aten.add.out, lambda x, y: torch.add(x, y, out=torch.empty_like(x))),
    "an out argument of another placement": (
        aten.add.out,
        lambda x, y: torch.add(x, y, out=empty_of(x)),
    ),
    "results that are numbers": (aten._local_scalar_dense.default, lambda x, y: replicated(x).sum().item()),
    "random numbers": (aten.rand_like.default, lambda x, y: torch.rand_like(x)),
    "random numbers in place": (aten.uniform_.default, lambda x, y: x.detach().uniform_()),
    "random masks": (aten.native_dropout.default, lambda x, y: torch.native_dropout(x, 0.25, True)),
    "what autograd saves": (
        aten.detach.default,
        lambda x, y: gradient_of(x, lambda one: one.softmax(-1).square()),
    ),
}


# Decisions of older releases do not say which elements of a list move.
FROM_2_15 = {"a list with such tensors", "norms, one of which is not partial"}


def _with_reasons(names: Iterable[str]) -> list[Any]:
    reason = "PyTorch moves elements of lists in older releases"
    return [
        pytest.param(name, marks=pytest.mark.skipif(TORCH < (2, 15) and name in FROM_2_15, reason=reason))
        for name in names
    ]


def with_replicated(x: DTensor, call: Callable[[Tensor], object], *shape: int) -> object:
    with implicit_replication():
        return call(x.to_local().new_ones(shape or (4,)))


def replicated(x: DTensor) -> DTensor:
    return x.redistribute(placements=[Replicate()])


def gradient_of(x: DTensor, call: Callable[[DTensor], Tensor]) -> Tensor:
    leaf = x.detach().requires_grad_()
    call(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def empty_of(x: DTensor) -> DTensor:
    return DTensor.from_local(x.to_local().new_empty(0), x.device_mesh, [Replicate()])


def _listed(value: object) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _assert_alike(one: DTensor, other: DTensor) -> None:
    """The DTensors themselves, apart from their local tensors, look the same."""

    def look(x: DTensor) -> tuple[Any, ...]:
        return (
            x.shape,
            x.stride(),
            x.dtype,
            x.device,
            x.layout,
            x.storage_offset(),
            x.untyped_storage().nbytes(),
            x.requires_grad,
            x.is_leaf,
            x._version,
            str(torch._C._dispatch_keys(x)),
        )

    assert look(one) == look(other)


@pytest.mark.on_devices_too
@pytest.mark.parametrize("name", _with_reasons(CALLS))
@on_ranks(2)
def test_a_call_is_served(rank: int, world: int, name: str) -> None:
    op, call = CALLS[name]
    mesh = mesh_of(world)
    whole = torch.arange(32.0).view(8, 4)

    def leaves() -> list[DTensor]:
        return [distribute_tensor(one, mesh, [Shard(0)]) for one in (whole.clone(), whole.clone() + 1)]

    def called() -> object:
        given = leaves()
        torch.manual_seed(0)
        return call(*given)

    expected = called()
    with funcol.installed():
        forget_operator_counts()
        for _ in range(3):
            actual = called()
        counts = operator_counts()[str(op)]
    assert set(counts) == {"served"}, counts
    for one, other in zip(_listed(actual), _listed(expected), strict=True):
        if not isinstance(other, DTensor):
            assert one == other
            continue
        assert one._spec == other._spec
        if not name.startswith("random"):  # funcol draws others: see test_random_operators.py
            assert torch.equal(one._local_tensor, other._local_tensor)
        _assert_alike(one, other)


@pytest.mark.parametrize("order", [1, 2, 2.5, math.inf])
@on_ranks(4)
def test_the_norm_of_gradients_of_many_layouts(rank: int, world: int, order: float) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    layouts = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2))
    plain = [torch.randn(4, 5) for _ in layouts]
    with funcol.installed():
        gradients = [distribute_tensor(x, mesh, layout) for x, layout in zip(plain, layouts, strict=True)]
        forget_operator_counts()
        norm = torch.nn.utils.get_total_norm(gradients, order)
        counts = operator_counts()
        assert isinstance(norm, DTensor)
        torch.testing.assert_close(norm.full_tensor(), torch.nn.utils.get_total_norm(plain, order))
    assert TORCH < (2, 15) or all(set(of_op) == {"served"} for of_op in counts.values()), counts


def trains(rank: int, world: int) -> list[list[float]]:
    torch.manual_seed(0)
    mesh = mesh_of(world)
    weights = [torch.randn(8, 8) / 3 for _ in range(2)]
    column, row = (
        distribute_tensor(weight, mesh, [Shard(dim)]).requires_grad_()
        for weight, dim in zip(weights, (1, 0), strict=True)
    )
    x = distribute_tensor(torch.randn(4, 8), mesh, [Replicate()])
    for _ in range(3):
        hidden = torch.nn.functional.silu(x @ column)
        out = (hidden @ row).redistribute(placements=[Replicate()])
        (out.pow(2).mean() + hidden.t().pow(2).mean()).backward()
        with torch.no_grad():
            for weight in (column, row):
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=0.1)
                weight.grad = None
    return [weight.full_tensor().flatten().tolist() for weight in (column, row)]


@on_ranks(2)
def test_training_is_bitwise_the_same(rank: int, world: int) -> None:
    expected = trains(rank, world)
    with funcol.installed():
        assert trains(rank, world) == expected
