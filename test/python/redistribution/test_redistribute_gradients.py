"""``redistribute`` on DTensors: values, dtypes, shard orders, and gradients of any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_full_tensor import own_shard
from ranks import on_ranks, run_ranks
from sharded import Layout, layouts, mesh_of, ordered, placed, reduced, whole_of
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _MaskPartial

from funcol.redistribution import redistribute, redistribute_local_tensor, redistribute_many

ON_DEVICES = True

SHAPE = (5, 6)


def gradient_layout(layout: Layout) -> Layout:
    """Replicated where ``layout`` is partial."""
    return layout._replace(words=tuple("R" if word[0] == "P" else word for word in layout.words))


ONE_AXIS = layouts("R", "S0", "S1", "_S0/2", "Psum")
TWO_AXES = [*layouts("R R", "S0 S0", "S0 S1", "Psum S0", "Psum Psum"), ordered("S0 S0", (0, (1, 0)))]
PAIRS = [
    *[((2,), src, dst) for src in ONE_AXIS for dst in ONE_AXIS],
    *[((2, 2), src, dst) for src in TWO_AXES for dst in TWO_AXES],
]


def each_pair(world: int) -> Any:
    chosen = [pair for pair in PAIRS if torch.Size(pair[0]).numel() == world]
    return pytest.mark.parametrize(
        ("mesh_shape", "src", "dst"), chosen, ids=[f"{src} to {dst}" for _, src, dst in chosen]
    )


def sends_the_gradient_back(
    rank: int, world: int, mesh_shape: tuple[int, ...], src: Layout, dst: Layout
) -> None:
    mesh = mesh_of(mesh_shape)
    leaf = placed(whole_of(SHAPE, torch.float64), src, mesh).requires_grad_()
    weights = whole_of(SHAPE, torch.float64).flip(0)
    result = redistribute(leaf, placements=dst.placements(), shard_order=dst.order)
    # Handed in as a DTensor: to_local() of stock forgets the shard order of the gradient.
    (grad,) = torch.autograd.grad(result, leaf, placed(weights, gradient_layout(dst), mesh))
    assert isinstance(grad, DTensor)
    expected = gradient_layout(src)
    assert grad.placements == expected.placements()
    assert torch.equal(grad.to_local(), own_shard(weights, expected, mesh))


@each_pair(2)
def test_the_gradient_has_the_layout_of_the_input_on_one_axis(
    mesh_shape: tuple[int, ...], src: Layout, dst: Layout
) -> None:
    run_ranks(sends_the_gradient_back, 2, mesh_shape, src, dst)


@each_pair(4)
def test_the_gradient_has_the_layout_of_the_input_on_two_axes(
    mesh_shape: tuple[int, ...], src: Layout, dst: Layout
) -> None:
    run_ranks(sends_the_gradient_back, 4, mesh_shape, src, dst)


@pytest.mark.parametrize("dst", layouts("R", "S0", "S1"), ids=str)
@pytest.mark.parametrize("src", layouts("R", "S0", "_S0/2"), ids=str)
@on_ranks(2)
def test_the_gradient_is_differentiable(rank: int, world: int, src: Layout, dst: Layout) -> None:
    mesh = mesh_of((world,))
    whole, weights = whole_of(SHAPE, torch.float64), whole_of(SHAPE, torch.float64).flip(0)
    leaf = placed(whole, src, mesh).requires_grad_()
    incoming = placed(whole, dst, mesh).requires_grad_()
    result = redistribute(leaf, placements=dst.placements())
    # All in DTensors: to_local() of older releases is not differentiable twice.
    (grad,) = torch.autograd.grad(result, leaf, incoming, create_graph=True)
    (second,) = torch.autograd.grad(grad, incoming, placed(weights, src, mesh))
    assert isinstance(second, DTensor)
    assert second.placements == dst.placements()
    assert torch.equal(second.to_local(), own_shard(weights, dst, mesh))


@on_ranks(2)
def test_values_and_gradients_are_sent_in_the_dtypes_asked_for(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    whole = whole_of(SHAPE, torch.float32) + 1 / 3
    leaf = placed(whole, Layout(("S0",)), mesh).requires_grad_()
    result = redistribute(
        leaf, placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float16
    )
    assert result.dtype == result.to_local().dtype == torch.bfloat16
    assert torch.equal(result.to_local(), whole.to(torch.bfloat16))
    weights = (whole / 7).to(torch.bfloat16)
    (result.to_local() * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert isinstance(leaf.grad, DTensor)
    assert leaf.grad.dtype == leaf.grad.to_local().dtype == torch.float32
    assert torch.equal(
        leaf.grad.to_local(), own_shard(weights.to(torch.float16).float(), Layout(("S0",)), mesh)
    )


@on_ranks(4)
def test_a_shard_order_is_part_of_the_layout(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    whole = whole_of(SHAPE, torch.float32)
    reversed_order = ordered("S0 S0", (0, (1, 0)))
    leaf = placed(whole, reversed_order, mesh)
    same = redistribute(leaf, placements=reversed_order.placements(), shard_order=reversed_order.order)
    assert torch.equal(same.to_local(), leaf.to_local())
    other = redistribute(leaf, placements=reversed_order.placements(), forward_dtype=torch.float64)
    assert torch.equal(other.to_local(), own_shard(whole.double(), Layout(("S0", "S0")), mesh))


@on_ranks(2)
def test_dims_may_be_counted_from_the_end(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    whole = whole_of(SHAPE, torch.float32)
    result = redistribute(placed(whole, Layout(("R",)), mesh), placements=[Shard(-1)])
    assert result.placements == (Shard(1),)
    assert torch.equal(result.to_local(), own_shard(whole, Layout(("S1",)), mesh))


@pytest.mark.parametrize("dst", layouts("R", "S0", "S2"), ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_rows_of_a_sharded_table_are_masked_and_summed(rank: int, world: int, dst: Layout) -> None:
    mesh = mesh_of((world,))
    table = whole_of((5, 3), torch.float32)
    indices = torch.tensor([[4, 0, 2], [1, 3, 3]])
    masked = _MaskPartial("sum", offset_shape=table.shape, offset_dim=0)

    def spec(placement: Any, tensor: Tensor) -> DTensorSpec:
        return DTensorSpec(
            mesh, (placement,), tensor_meta=TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        )

    own = redistribute_local_tensor(indices, spec(Replicate(), indices), spec(masked, indices))
    rows = torch.nn.functional.embedding(own, own_shard(table, Layout(("S0",)), mesh))
    kept = rows.clone()
    expected = torch.nn.functional.embedding(indices, table)
    result = redistribute_local_tensor(rows, spec(masked, expected), dst.spec(mesh, expected))
    assert torch.equal(result, own_shard(expected, dst, mesh))
    assert torch.equal(rows, kept)


def reduces_norms(rank: int, world: int, mesh_shape: tuple[int, ...], src: Layout, dst: str) -> None:
    mesh = mesh_of(mesh_shape)
    whole = whole_of(SHAPE, torch.float64)
    layout = Layout(tuple(dst.split()))
    target = layout.placements()
    norms = torch.linalg.vector_norm(placed(whole, src, mesh), dim=1)
    assert any(isinstance(placement, _NormPartial) for placement in norms.placements)
    expected = torch.linalg.vector_norm(whole, dim=1)
    result = redistribute(norms, placements=target)
    assert torch.allclose(reduced(result.to_local(), layout, mesh), own_shard(expected, layout, mesh))
    (many,) = redistribute_many([norms], target)
    assert torch.equal(many.to_local(), result.to_local())
    again = redistribute(redistribute(result, placements=norms.placements), placements=result.placements)
    assert torch.allclose(again.to_local(), result.to_local())


@pytest.mark.parametrize(
    ("mesh_shape", "src", "dst"),
    [
        ((2,), Layout(("S1",)), "R"),
        ((2,), Layout(("S1",)), "S0"),
        ((2,), Layout(("S1",)), "Psum"),
        ((2, 2), Layout(("S0", "S1")), "S0 R"),
        ((2, 2), Layout(("S0", "S1")), "R S0"),
        ((2, 2), Layout(("S1", "S1")), "S0 R"),
    ],
)
def test_partial_norms_are_reduced_as_they_say(mesh_shape: tuple[int, ...], src: Layout, dst: str) -> None:
    run_ranks(reduces_norms, 2 if mesh_shape == (2,) else 4, mesh_shape, src, dst)


@on_ranks(4)
def test_partial_norms_among_sums_are_refused(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    mixed = DTensor.from_local(torch.ones(3), mesh, [Partial(), _NormPartial(2)], run_check=False)
    with pytest.raises(ValueError, match="reduced first"):
        redistribute(mixed, placements=[Replicate(), Replicate()])


@on_ranks(1)
def test_what_is_no_dtensor_or_has_no_target_is_refused(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    with pytest.raises(TypeError, match="expected a DTensor"):
        redistribute(torch.ones(2), placements=[Replicate()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="placements"):
        redistribute(placed(torch.ones(2), Layout(("R",)), mesh))
