"""Rows and elements picked by indices where the table is cut: masks, from the decision to the reduction."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import Layout, layouts, mesh_of
from simulated import Call, Simulation
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.nn import functional

import funcol
from funcol import _compat
from funcol.redistribution import redistribute_local_tensor
from funcol.sharding import ShardingPropagator

aten = torch.ops.aten

WORLD = 4


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def indices(size: int, *shape: int) -> Tensor:
    """Returns all indices below ``size`` in turn."""
    return (torch.arange(torch.Size(shape).numel()) * 7 % size).view(shape)


LOOKUPS = {
    "rows": Call(aten.embedding.default, (numbers(12, 4), indices(12, 4, 6)), {}),
    "uneven_rows": Call(aten.embedding.default, (numbers(7, 3), indices(7, 5)), {}),
    "rows_of_a_batch": Call(aten.embedding.default, (numbers(5, 2), indices(5, 2, 3, 2)), {}),
    "one_row": Call(aten.embedding.default, (numbers(9, 4), torch.tensor(8)), {}),
    "elements": Call(aten.gather.default, (numbers(6, 8), 1, indices(8, 6, 1)), {}),
    "uneven_elements": Call(aten.gather.default, (numbers(7, 5, 3), -3, indices(7, 1, 5, 3)), {}),
    "elements_of_some_rows": Call(aten.gather.default, (numbers(7, 5), 1, indices(5, 4, 1)), {}),
    "several_elements": Call(aten.gather.default, (numbers(6, 5), 0, indices(6, 4, 5)), {}),
}


def of_a_cut_table(call: Call, axes: int) -> Iterator[list[Layout]]:
    """Yields the table in every way that cuts it or leaves it whole, the indices too."""
    table, index = call.tensors()
    words = [["R", *(f"S{dim}" for dim in range(tensor.dim()))] for tensor in (table, index)]
    for choice in itertools.product(*(itertools.product(some, repeat=axes) for some in words)):
        yield [Layout(tuple(of_one)) for of_one in choice]


def masks_of(spec: Any) -> list[_MaskPartial]:
    return [placement for placement in spec.placements if isinstance(placement, _MaskPartial)]


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mesh", ["2", "2x2"], indirect=True)
@pytest.mark.parametrize("name", LOOKUPS)
def test_what_is_picked_from_a_cut_table_is_the_same(
    propagator: ShardingPropagator, mesh: DeviceMesh, name: str
) -> None:
    masked: Counter[bool] = Counter()
    for chosen in of_a_cut_table(LOOKUPS[name], mesh.ndim):
        decision = Simulation(propagator, mesh, LOOKUPS[name], chosen).check()
        masked[bool(masks_of(decision.output_spec))] += 1
    assert masked[False] > 0
    assert (masked[True] > 0) == (name != "several_elements")


def lookup(mesh: DeviceMesh, rows: int = 12, table: str = "S0", index: str = "R") -> OpSchema:
    call = Call(aten.embedding.default, (numbers(rows, 4), indices(rows, 4)), {})
    return Simulation(ShardingPropagator(), mesh, call, layouts(table, index)).schema()


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mesh", ["2"], indirect=True)
class TestMasksOfDecisions:
    """Which decisions have one mask."""

    def test_of_indices_and_result_are_one(self, propagator: ShardingPropagator, mesh: DeviceMesh) -> None:
        sharding = propagator.propagate_op_sharding(lookup(mesh))
        table, index = sharding.redistribute_schema.args_schema  # type: ignore[union-attr]
        (of_indices,), (of_result,) = masks_of(index), masks_of(sharding.output_spec)
        assert of_result == of_indices
        assert (of_result.offset_shape, of_result.offset_dim) == (torch.Size((12, 4)), 0)
        assert table.placements == (Shard(0),)  # type: ignore[union-attr]

    def test_of_a_schema_are_one(self, propagator: ShardingPropagator, mesh: DeviceMesh) -> None:
        first, again = (propagator.propagate_op_sharding(lookup(mesh)) for _ in range(2))
        assert first.output_spec == again.output_spec

    @pytest.mark.parametrize("remember", [True, False])
    def test_of_two_schemas_are_two(
        self, propagator: ShardingPropagator, mesh: DeviceMesh, remember: bool
    ) -> None:
        decide = propagator.propagate_op_sharding
        forget = propagator.propagate_op_sharding_non_cached
        first = (decide if remember else forget)(lookup(mesh))
        other = (decide if remember else forget)(lookup(mesh, rows=10 if remember else 12))
        assert masks_of(first.output_spec)[0].mask_buffer is not masks_of(other.output_spec)[0].mask_buffer

    def test_of_a_listed_strategy_are_one(self, propagator: ShardingPropagator, mesh: DeviceMesh) -> None:
        listed = propagator.strategies(lookup(mesh)).strategies  # type: ignore[union-attr]
        (masked,) = (one for one in listed if masks_of(one.output_spec))
        assert masked.output_spec.placements[0] == masked.input_specs[1].placements[0]


def picks(rank: int, world: int, mesh_shape: tuple[int, ...], name: str, target: str) -> int:
    """Returns how many of the decisions make masks."""
    mesh, call = mesh_of(mesh_shape), LOOKUPS[name]
    propagator = ShardingPropagator()
    num_masked = 0
    for chosen in of_a_cut_table(call, mesh.ndim):
        schema = Simulation(propagator, mesh, call, chosen).schema()
        decision = propagator.propagate_op_sharding(schema)
        wanted = decision.redistribute_schema or schema
        local = []
        for tensor, to in zip(call.tensors(), specs_in(wanted), strict=True):
            whole = Layout(("R",) * mesh.ndim).spec(mesh, tensor)
            local.append(redistribute_local_tensor(tensor, whole, to))
        table, index = local
        args = (table, index) if len(call.args) == 2 else (table, call.args[1], index)
        picked = call.op(*args)
        expected = call.op(*call.args)
        assert isinstance(decision.output_spec, DTensorSpec)
        layout = Layout((target,) * mesh.ndim)
        result = redistribute_local_tensor(picked, decision.output_spec, layout.spec(mesh, expected))
        own = redistribute_local_tensor(
            expected, Layout(("R",) * mesh.ndim).spec(mesh, expected), layout.spec(mesh, expected)
        )
        assert torch.equal(result, own), [str(one) for one in chosen]
        num_masked += bool(masks_of(decision.output_spec))
    return num_masked


def specs_in(schema: OpSchema) -> list[DTensorSpec]:
    return [argument for argument in schema.args_schema if isinstance(argument, DTensorSpec)]


@pytest.mark.parametrize("target", ["R", "S0"])
@pytest.mark.parametrize("name", ["uneven_rows", "uneven_elements"])
@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (2, 2)])
def test_what_is_picked_is_reduced_to_the_same(mesh_shape: tuple[int, ...], name: str, target: str) -> None:
    world = torch.Size(mesh_shape).numel()
    num_masked = run_ranks(picks, world, mesh_shape, name, target)
    assert (min(num_masked) > 0) == (world > 1)  # one rank has the whole table


@contextlib.contextmanager
def decided_by(propagator: str) -> Iterator[None]:
    """DTensor's dispatcher with funcol's propagator, or with funcol installed."""
    dispatcher = DTensor._op_dispatcher
    before = dispatcher.sharding_propagator
    with funcol.installed() if propagator == "installed" else contextlib.nullcontext():
        if propagator == "funcol":
            dispatcher.sharding_propagator = ShardingPropagator()
            _compat.forget_decisions()
        try:
            yield
        finally:
            if propagator == "funcol":
                dispatcher.sharding_propagator = before
                _compat.forget_decisions()


def learns(rank: int, world: int, mesh_shape: tuple[int, ...], propagator: str) -> None:
    mesh = mesh_of(mesh_shape)
    whole = numbers(7, 4).requires_grad_()
    everywhere = [Replicate()] * (mesh.ndim - 1)
    with decided_by(propagator):
        table = distribute_tensor(whole.detach(), mesh, [Shard(0), *everywhere]).requires_grad_()
        for turn in range(2):  # a mask is free again once it is applied
            index = (indices(7, 3, 5) + turn) % 7
            rows = functional.embedding(distribute_tensor(index, mesh, [Replicate(), *everywhere]), table)
            assert bool(masks_of(rows)) == (propagator == "funcol")
            expected = functional.embedding(index, whole)
            found = rows.full_tensor()
            assert torch.equal(found, expected)
            found.square().sum().backward()
            expected.square().sum().backward()
        assert isinstance(table.grad, DTensor)
        assert whole.grad is not None
        assert torch.allclose(table.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
@pytest.mark.parametrize("propagator", ["funcol", "installed"])
def test_a_cut_table_learns_as_a_whole_one(propagator: str, mesh_shape: tuple[int, ...]) -> None:
    run_ranks(learns, torch.Size(mesh_shape).numel(), mesh_shape, propagator)
