"""Under funcol.install(), gradients of DTensors whose axes cut in an order of their own."""

from __future__ import annotations

import inspect

import pytest
import torch
from against_full_tensor import own_shard
from ranks import on_ranks, run_ranks
from sharded import Layout, layouts, mesh_of, ordered, placed, whole_of
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

import funcol

ON_DEVICES = True

SHAPE = (8, 6)
ORDERED = [
    ordered("S0 S0", (0, (1, 0))),
    ordered("S1 S1", (1, (1, 0))),
    *layouts("S0 S0", "S0 S1", "_S0/2 S0", "S0 Psum"),
]


def stated(layout: Layout, states: bool) -> tuple[Placement, ...] | None:
    replicated = layout._replace(words=tuple("R" if word[0] == "P" else word for word in layout.words))
    return replicated.placements() if states else None


def goes_through_to_local(
    rank: int, world: int, layout: Layout, shape: tuple[int, ...], states: bool, compiles: bool
) -> None:
    mesh = mesh_of((2, 2))
    whole = whole_of(shape, torch.float64)
    weights = whole.flip(0) + 1
    placements = stated(layout, states)

    def loss(x: DTensor, weight: Tensor) -> Tensor:
        return (x.to_local(grad_placements=placements) * weight).sum()

    with funcol.installed():
        leaf = placed(whole, layout, mesh).requires_grad_()
        run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiles else loss
        (gradient,) = torch.autograd.grad(run(leaf, own_shard(weights, layout, mesh)), leaf)
        assert isinstance(gradient, DTensor)
        assert torch.equal(gradient.full_tensor(), weights)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, (5, 7)], ids=str)
@pytest.mark.parametrize("layout", ORDERED, ids=str)
def test_the_gradient_of_to_local_keeps_the_order(
    layout: Layout, shape: tuple[int, ...], states: bool
) -> None:
    run_ranks(goes_through_to_local, 4, layout, shape, states, False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ORDERED[:3], ids=str)
def test_the_gradient_of_a_compiled_to_local_keeps_the_order(layout: Layout) -> None:
    if layout.order and "shard_order" not in inspect.getsource(DTensor.__tensor_unflatten__):
        pytest.skip("this PyTorch drops the order where a DTensor leaves a compiled region")
    run_ranks(goes_through_to_local, 4, layout, SHAPE, False, True)


@pytest.mark.parametrize("layout", ORDERED[:3], ids=str)
@on_ranks(4)
def test_the_gradient_of_to_local_is_differentiable(rank: int, world: int, layout: Layout) -> None:
    mesh = mesh_of((2, 2))
    whole = whole_of(SHAPE, torch.float64)
    with funcol.installed():
        leaf = placed(whole, layout, mesh).requires_grad_()
        weight = own_shard(whole.flip(0), layout, mesh).requires_grad_()
        local = leaf.to_local()
        (gradient,) = torch.autograd.grad(local, leaf, weight, create_graph=True)
        (second,) = torch.autograd.grad(gradient, weight, placed(whole + 1, layout, mesh))
        assert torch.equal(second, own_shard(whole + 1, layout, mesh))


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("given", ORDERED, ids=str)
@pytest.mark.parametrize("src", layouts("S0 S0", "S1 S1", "R S0", "R R"), ids=str)
@on_ranks(4)
def test_the_gradient_of_from_local_is_cut_as_the_tensor(
    rank: int, world: int, src: Layout, given: Layout, states: bool
) -> None:
    mesh = mesh_of((2, 2))
    whole = whole_of(SHAPE, torch.float64)
    weights = whole.flip(0) + 1
    with funcol.installed():
        local = own_shard(whole, src, mesh).requires_grad_()
        x = DTensor.from_local(
            local,
            mesh,
            src.placements(),
            shape=whole.shape,
            stride=whole.stride(),
            grad_placements=src.placements() if states else None,
        )
        (gradient,) = torch.autograd.grad(x, local, placed(weights, given, mesh))
        assert torch.equal(gradient, own_shard(weights, src, mesh))


@pytest.mark.parametrize("dst", layouts("R R", "S0 S0", "S1 S1", "S0 R"), ids=str)
@pytest.mark.parametrize("src", ORDERED, ids=str)
@on_ranks(4)
def test_the_gradient_of_redistribute_has_the_order_of_the_tensor(
    rank: int, world: int, src: Layout, dst: Layout
) -> None:
    mesh = mesh_of((2, 2))
    whole = whole_of(SHAPE, torch.float64)
    weights = whole.flip(0) + 1
    with funcol.installed():
        leaf = placed(whole, src, mesh).requires_grad_()
        result = leaf.redistribute(placements=dst.placements())
        assert torch.equal(result.full_tensor(), whole)
        (gradient,) = torch.autograd.grad((result * placed(weights, dst, mesh)).sum(), leaf)
        assert isinstance(gradient, DTensor)
        assert torch.equal(gradient.full_tensor(), weights)


@pytest.mark.parametrize("layout", ORDERED, ids=str)
@on_ranks(4)
def test_the_gradient_of_full_tensor_has_the_order_of_the_tensor(
    rank: int, world: int, layout: Layout
) -> None:
    mesh = mesh_of((2, 2))
    whole = whole_of(SHAPE, torch.float64)
    weights = whole.flip(0) + 1
    with funcol.installed():
        leaf = placed(whole, layout, mesh).requires_grad_()
        (gradient,) = torch.autograd.grad((leaf.full_tensor() * weights).sum(), leaf)
        assert isinstance(gradient, DTensor)
        assert torch.equal(gradient.full_tensor(), weights)
