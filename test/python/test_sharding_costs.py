"""Decisions of the propagator are the cheapest: of all in the full product, and beside PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from simulated import Simulation, WrongResultError, some_layouts
from test_sharding_numbers import INFOS, SAMPLE, calls_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, TupleStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from funcol import _C
from funcol.sharding import ShardingPropagator, redistribute_cost_table

# Parts of the world: no group spans several axes, so that all plans are of steps over one axis.
MESHES = {"2": [0, 1], "2x2": [[0, 1], [2, 3]], "2x2x2": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]}


@pytest.fixture(scope="module", autouse=True)
def _fake_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def propagator() -> ShardingPropagator:
    return ShardingPropagator()


@pytest.fixture(params=MESHES)
def mesh(request: pytest.FixtureRequest) -> DeviceMesh:
    return DeviceMesh("cpu", MESHES[request.param])


def simulations(
    propagator: Any, mesh: DeviceMesh, name: str, calls: int, layouts: int
) -> Iterator[Simulation]:
    for call in itertools.islice(calls_of(INFOS[name][0], 4), calls):
        for chosen in some_layouts(call, mesh.ndim, layouts, seed=2):
            yield Simulation(propagator, mesh, call, chosen)


def specs_of(schema: OpSchema) -> list[DTensorSpec]:
    leaves = tree_leaves(
        (schema.args_schema, schema.kwargs_schema), is_leaf=lambda leaf: isinstance(leaf, DTensorSpec)
    )
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def decided(propagator: Any, schema: OpSchema) -> OutputSharding | None:
    """Nothing where the operator cannot run on the tensors as they are."""
    try:
        sharding: OutputSharding = propagator.propagate_op_sharding_non_cached(schema)
    except (NotImplementedError, ValueError, RuntimeError, AssertionError, KeyError):
        return None
    return sharding


def cost_of(schema: OpSchema, sharding: OutputSharding) -> float:
    wanted = sharding.redistribute_schema if sharding.needs_redistribute else None
    pairs = zip(specs_of(schema), specs_of(wanted or schema), strict=True)
    return sum(redistribute_cost_table([source], [target])[0][0] for source, target in pairs)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_decision_costs_the_least_of_the_full_product(
    propagator: ShardingPropagator, mesh: DeviceMesh, name: str
) -> None:
    for simulation in simulations(propagator, mesh, name, calls=3, layouts=1):
        schema = simulation.schema()
        sharding = decided(propagator, schema)
        if sharding is None or sharding.output_spec is None or not _C.has_rule(schema.op.name()):
            continue
        strategies = propagator.strategies(schema)
        assert not isinstance(strategies, TupleStrategy)
        least = min(sum(map(sum, each.redistribute_cost)) for each in strategies.strategies)
        assert cost_of(schema, sharding) == pytest.approx(least), schema


# Older minors have rules of the whole mesh, some of which are right for some numbers only (any of a sum).
has_rules_of_an_axis = pytest.mark.skipif(
    len(getattr(DTensor._op_dispatcher.sharding_propagator, "op_single_dim_strategy_funcs", ())) < 1000,
    reason="this PyTorch has few rules of one mesh axis",
)


@has_rules_of_an_axis
@pytest.mark.parametrize("name", SAMPLE)
def test_no_decision_costs_more_than_a_right_one_of_pytorchs(
    propagator: ShardingPropagator, mesh: DeviceMesh, name: str
) -> None:
    stock = DTensor._op_dispatcher.sharding_propagator
    for simulation in simulations(stock, mesh, name, calls=2, layouts=1 if mesh.ndim == 3 else 3):
        schema = simulation.schema()
        ours, theirs = decided(propagator, schema), decided(stock, schema)
        if ours is not None and theirs is not None and costs_more(schema, ours, theirs):
            with pytest.raises((WrongResultError, RuntimeError)):  # theirs does not give the result
                simulation.check()


def costs_more(schema: OpSchema, a: OutputSharding, b: OutputSharding) -> bool:
    return cost_of(schema, a) > cost_of(schema, b) * 1.000001
