"""Decisions of the propagator are the cheapest: of all in the full product, and beside PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from operator_samples import INFOS, SAMPLE, calls_of
from simulated import MESHES, Simulation, WrongResultError, decided, some_layouts, specs_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, TupleStrategy
from versions import HAS_RULES_OF_AN_AXIS

from funcol import _C, _compat
from funcol.sharding import ShardingPropagator, redistribute_cost_table

# The meshes have fewer ranks: no group spans several axes, so that each step of a plan is over one axis.
WORLD = 16
pytestmark = [
    pytest.mark.usefixtures("fake_world"),
    pytest.mark.parametrize("mesh", MESHES, indirect=True),
]


def simulations(
    propagator: Any, mesh: DeviceMesh, name: str, calls: int, layouts: int
) -> Iterator[Simulation]:
    for call in itertools.islice(calls_of(INFOS[name][0], 4), calls):
        for chosen in some_layouts(call, mesh.ndim, layouts, seed=2):
            yield Simulation(propagator, mesh, call, chosen)


def cost_of(schema: OpSchema, sharding: OutputSharding) -> float:
    wanted = sharding.redistribute_schema if sharding.needs_redistribute else None
    pairs = zip(specs_of(schema), specs_of(wanted or schema), strict=True)
    return sum(redistribute_cost_table([source], [target])[0][0] for source, target in pairs)


@pytest.mark.sampled(6)
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


# Older releases have rules of the whole mesh. For these operators they know ways that no rule of an axis
# has: right for some numbers only (any of a sum, a mean of which nothing is ignored), or of partials made of
# shards.
WITH_OTHER_WAYS = {
    torch.ops.aten.any.dim,
    torch.ops.aten.nll_loss_forward.default,
    torch.ops.aten.cat.default,
}
has_rules_of_an_axis = pytest.mark.skipif(
    not HAS_RULES_OF_AN_AXIS, reason="this PyTorch has few rules of one mesh axis"
)


@pytest.mark.sampled(6)
@has_rules_of_an_axis
@pytest.mark.parametrize("name", SAMPLE)
def test_no_decision_costs_more_than_a_right_one_of_pytorchs(
    propagator: ShardingPropagator, mesh: DeviceMesh, name: str
) -> None:
    stock = DTensor._op_dispatcher.sharding_propagator
    num_comparable = 0
    for simulation in simulations(stock, mesh, name, calls=2, layouts=1 if mesh.ndim == 3 else 3):
        schema = simulation.schema()
        if schema.op in WITH_OTHER_WAYS and has_rule_of_the_whole_mesh(stock, schema.op):
            continue
        num_comparable += 1
        ours, theirs = decided(propagator, schema), decided(stock, schema)
        if ours is not None and theirs is not None and costs_more(schema, ours, theirs):
            with pytest.raises((WrongResultError, RuntimeError)):  # PyTorch's cheaper decision is wrong
                simulation.check()
    if num_comparable == 0:
        pytest.skip("this PyTorch decides for the whole mesh, with ways that no rule of an axis has")


def has_rule_of_the_whole_mesh(stock: Any, op: Any) -> bool:
    """Returns true if PyTorch has a rule for ``op`` that may decide otherwise than axis by axis: it follows
    the placements of the first tensor, or is right for some sizes only."""
    rule = stock.op_strategy_funcs.get(op)
    return rule is not None and not _compat.has_single_strategy(rule)


def costs_more(schema: OpSchema, a: OutputSharding, b: OutputSharding) -> bool:
    return cost_of(schema, a) > cost_of(schema, b) * 1.000001
