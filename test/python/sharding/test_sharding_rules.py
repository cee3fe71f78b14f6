"""funcol.sharding.ShardingPropagator: strategies, rules of the user's own, the dispatcher, bad input."""

from __future__ import annotations

import unittest.mock
from typing import Any

import pytest
import torch
from specs import placements, spec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OpSpec, OpStrategy, TupleStrategy

import funcol
import funcol.sharding
from funcol import _C, _compat
from funcol.sharding import ShardingPropagator

aten = torch.ops.aten

WORLD = 8
pytestmark = pytest.mark.usefixtures("fake_world")


# All strategies


def test_strategies_are_the_full_product_with_costs(propagator: ShardingPropagator, grid: DeviceMesh) -> None:
    schema = OpSchema(aten.mm.default, (spec(grid, (8, 16), "S0 R"), spec(grid, (16, 8), "R R")), {})
    strategies = propagator.strategies(schema)
    assert isinstance(strategies, OpStrategy)
    free = [each for each in strategies.strategies if sum(map(sum, each.redistribute_cost)) == 0]
    assert placements_of(free[0]) == ((Shard(0), Replicate()), (Replicate(), Replicate()))
    assert len({placements_of(each) for each in strategies.strategies}) == len(strategies.strategies)


def placements_of(strategy: OpSpec) -> tuple[Any, ...]:
    return tuple(each.placements for each in strategy.input_specs or ())


def test_the_decision_is_a_cheapest_strategy(propagator: ShardingPropagator, grid: DeviceMesh) -> None:
    schema = OpSchema(aten.mm.default, (spec(grid, (8, 16), "S1 R"), spec(grid, (16, 8), "R S1")), {})
    decided = propagator.propagate_op_sharding(schema).redistribute_schema or schema
    wanted = tuple(each.placements for each in decided.args_schema)
    costs = {
        placements_of(each): sum(map(sum, each.redistribute_cost))
        for each in propagator.strategies(schema).strategies
    }
    assert costs[wanted] == min(costs.values())


def test_lists_have_strategies_for_each_element(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    x = [spec(line, (16, 8), "S0"), spec(line, (8, 8), "S1")]
    strategies = propagator.strategies(OpSchema(aten._foreach_neg.default, (x,), {}))
    assert isinstance(strategies, TupleStrategy)
    assert len(strategies.children) == 2


def test_a_table_of_costs_has_those_of_plans() -> None:
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]])  # part of the world: no group for both axes
    specs = [spec(grid, (64, 32), words) for words in ("R R", "S0 R", "S1 S0", "Psum S1")]
    table = funcol.sharding.redistribute_cost_table(specs, specs[:3])
    plans = [
        [
            funcol.plan_redistribution(
                source.placements, target.placements, grid, (64, 32), torch.float32
            ).cost
            for target in specs[:3]
        ]
        for source in specs
    ]
    assert table == [pytest.approx(row) for row in plans]


def test_a_table_of_costs_is_of_one_tensor(grid: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=r"f32\[8, 8\].*f32\[8, 4\].*Expected specs of one tensor"):
        funcol.sharding.redistribute_cost_table([spec(grid, (8, 8), "R R")], [spec(grid, (8, 4), "R R")])


def test_a_table_of_no_costs_is_empty(grid: DeviceMesh) -> None:
    assert funcol.sharding.redistribute_cost_table([], []) == []


# Rules of the user's own


@pytest.fixture(scope="module")
def unknown_op() -> Any:
    library = torch.library.Library("funcol_sharding_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
    yield torch.ops.funcol_sharding_test.twice.default
    library._destroy()


def test_a_rule_for_one_axis_serves_any_mesh(
    propagator: ShardingPropagator, grid: DeviceMesh, unknown_op: Any
) -> None:
    def rule(op: Any, args: Any, kwargs: Any) -> Any:
        return [[Shard(dim), Shard(dim)] for dim in range(len(args[0].shape))] + [[Partial(), Partial()]]

    propagator.register_single_axis_rule(unknown_op, rule)
    sharding = propagator.propagate_op_sharding(OpSchema(unknown_op, (spec(grid, (8, 8), "Psum S1"),), {}))
    assert placements(sharding) == (Partial("sum"), Shard(1))


def test_a_rule_takes_the_place_of_the_one_there_was(
    propagator: ShardingPropagator, line: DeviceMesh
) -> None:
    schema = OpSchema(aten.neg.default, (spec(line, (16, 8), "S0"),), {})
    propagator.propagate_op_sharding(schema)
    propagator.register_single_axis_rule(aten.neg.default, lambda op, args, kwargs: [])
    assert placements(propagator.propagate_op_sharding(schema)) == (Replicate(),)


def cut_by_columns(op_schema: OpSchema) -> OpStrategy:
    """Returns a strategy of the whole mesh."""
    source = op_schema.args_schema[0].strategies[0].output_spec  # type: ignore[attr-defined]
    whole = DTensorSpec(source.mesh, (Shard(1),), tensor_meta=source.tensor_meta)
    return OpStrategy([OpSpec(whole, [whole], [[1.0]])])


def test_a_strategy_of_the_whole_mesh_is_taken(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    propagator.register_op_strategy(aten.neg.default, cut_by_columns)
    schema = OpSchema(aten.neg.default, (spec(line, (16, 8), "S0"),), {})
    assert placements(propagator.propagate_op_sharding(schema)) == (Shard(1),)


def test_sizes_among_the_arguments_of_a_strategy_of_the_whole_mesh_are_of_the_rank(
    propagator: ShardingPropagator, line: DeviceMesh
) -> None:
    def cut_by_images(op_schema: OpSchema) -> OpStrategy:
        images = op_schema.args_schema[0].strategies[0].output_spec  # type: ignore[attr-defined]
        return OpStrategy([OpSpec((images, images, images), [images], [[0.0]])])

    propagator.register_op_strategy(aten.native_group_norm.default, cut_by_images)
    args = (spec(line, (16, 6, 2, 2), "S0"), None, None, 16, 6, 4, 3, 1e-5)
    sharding = propagator.propagate_op_sharding(OpSchema(aten.native_group_norm.default, args, {}))
    assert sharding.redistribute_schema.args_schema[3:6] == (2, 6, 4)


# C++ has no values for complex numbers: PyTorch's functions decide, and are remembered apart.


def times_i(x: DTensorSpec) -> OpSchema:
    return OpSchema(aten.mul.Scalar, (x, 1j), {})


def test_a_rule_takes_the_place_of_what_is_remembered_of_another(
    propagator: ShardingPropagator, line: DeviceMesh
) -> None:
    schema = times_i(spec(line, (16, 8), "S0"))
    assert placements(propagator.propagate_op_sharding(schema)) == (Shard(0),)
    propagator.register_op_strategy(aten.mul.Scalar, cut_by_columns)
    assert placements(propagator.propagate_op_sharding(schema)) == (Shard(1),)


@pytest.mark.parametrize(("cache_size", "decided"), [(1, 3), (2, 2)])
def test_the_least_recent_decision_of_a_strategy_goes_first(
    line: DeviceMesh, cache_size: int, decided: int
) -> None:
    propagator = ShardingPropagator(cache_size=cache_size)
    strategy = unittest.mock.Mock(side_effect=cut_by_columns)
    propagator.register_op_strategy(aten.mul.Scalar, strategy)
    for rows in (16, 8, 16):
        propagator.propagate_op_sharding(times_i(spec(line, (rows, 8), "S0")))
    assert strategy.call_count == decided


def test_a_cleared_cache_remembers_no_decision_of_a_strategy(
    propagator: ShardingPropagator, line: DeviceMesh
) -> None:
    strategy = unittest.mock.Mock(side_effect=cut_by_columns)
    propagator.register_op_strategy(aten.mul.Scalar, strategy)
    for _ in range(2):
        propagator.propagate_op_sharding(times_i(spec(line, (16, 8), "S0")))
        propagator.cache_clear()
    assert strategy.call_count == 2


def test_other_propagators_keep_their_rules(line: DeviceMesh) -> None:
    ShardingPropagator().register_single_axis_rule(aten.neg.default, lambda op, args, kwargs: [])
    schema = OpSchema(aten.neg.default, (spec(line, (16, 8), "S0"),), {})
    assert placements(ShardingPropagator().propagate_op_sharding(schema)) == (Shard(0),)


# In the dispatcher


def test_it_stands_in_for_the_dispatchers_own(
    propagator: ShardingPropagator, line: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    decided = []
    decide = propagator._propagate
    monkeypatch.setattr(
        propagator, "_propagate", lambda *args, **how: decided.append(args) or decide(*args, **how)
    )
    monkeypatch.setattr(DTensor._op_dispatcher, "sharding_propagator", propagator)
    x = DTensor.from_local(torch.ones(2, 8), line, (Shard(0),))
    y = torch.nn.functional.softmax(x @ x.T.redistribute(line, (Replicate(),)), -1).sum(1)
    assert y.placements == (Shard(0),)
    assert aten.mm.default in {schema.op for schema, *_ in decided}


def test_propagate_sets_the_sharding_of_an_op_info(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    schema = OpSchema(aten.neg.default, (spec(line, (16, 8), "S0"),), {})
    info = OpInfo(line, schema, [], [], {})
    propagator.propagate(info)
    assert placements(info.output_sharding) == (Shard(0),)


# Symbolic sizes: PyTorch's functions decide.


def test_views_are_compiled_for_symbolic_sizes(
    propagator: ShardingPropagator, line: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (16, 24, 32)
    monkeypatch.setattr(DTensor._op_dispatcher, "sharding_propagator", propagator)
    compiled = torch.compile(lambda x: x.view(x.shape[0], 2, 4).squeeze(1) + 1, backend="eager", dynamic=True)
    xs = [DTensor.from_local(torch.ones(size // 8, 8), line, (Shard(0),)) for size in sizes]
    results = [compiled(x) for x in xs]
    assert [result.to_local().shape for result in results] == [(size // 8, 2, 4) for size in sizes]
    assert {result.placements for result in results} == {(Shard(0),)}


# Rules


def test_every_operator_with_a_rule_of_pytorchs_has_one_in_cpp() -> None:
    base = DTensor._op_dispatcher.sharding_propagator
    known = {op for table in _compat.TABLES_OF_RULES for op in getattr(base, table, ())}
    own = {op for op in known if op.namespace in ("aten", "prims")}
    assert own
    assert not [op for op in own if not _C.has_rule(op.name())]


# Bad input


def test_an_unknown_operator_is_named_with_its_neighbours(
    propagator: ShardingPropagator, line: DeviceMesh, unknown_op: Any
) -> None:
    schema = OpSchema(unknown_op, (spec(line, (16, 8), "S0"),), {})
    with pytest.raises(
        NotImplementedError, match=r"funcol_sharding_test::twice.*near names.*register_single_axis_rule"
    ):
        propagator.propagate_op_sharding(schema)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([Shard(0)], r"aten::neg.*a row of 1 placements.*Expected 1 for its outputs and then 1"),
        ([Shard(0), Shard(2)], r"aten::neg.*dim 2 of tensor argument 0.*f32\[16, 8\]"),
        ([Shard(5), Shard(0)], r"aten::neg.*dim 5 of output 0"),
        ([Shard(0), None], r"aten::neg.*no placement for its tensor argument 0"),
    ],
)
def test_a_rule_that_contradicts_the_operator_is_an_error(
    propagator: ShardingPropagator, line: DeviceMesh, row: list[Any], message: str
) -> None:
    propagator.register_single_axis_rule(aten.neg.default, lambda op, args, kwargs: [row])
    with pytest.raises(ValueError, match=message):
        propagator.propagate_op_sharding(OpSchema(aten.neg.default, (spec(line, (16, 8), "S0"),), {}))


def test_tensors_of_two_meshes_are_an_error(
    propagator: ShardingPropagator, line: DeviceMesh, grid: DeviceMesh
) -> None:
    schema = OpSchema(aten.add.Tensor, (spec(line, (16, 8), "S0"), spec(grid, (16, 8), "S0 R")), {})
    with pytest.raises(ValueError, match=r"aten::add.Tensor got tensors of two meshes.*tensor argument 1"):
        propagator.propagate_op_sharding(schema)


def test_a_spec_without_sizes_is_an_error(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="no tensor_meta"):
        propagator.propagate_op_sharding(OpSchema(aten.neg.default, (DTensorSpec(line, (Shard(0),)),), {}))


def test_what_cannot_be_written_where_it_is_is_an_error(
    propagator: ShardingPropagator, line: DeviceMesh
) -> None:
    x, y = spec(line, (16, 8), "Psum"), spec(line, (16, 8), "S0")
    with pytest.raises(
        ValueError, match=r"aten::pow_.Tensor: no way to run it leaves the tensors that it writes to"
    ):
        propagator.propagate_op_sharding(OpSchema(aten.pow_.Tensor, (x, y), {}))


def test_operators_are_listed() -> None:
    assert "aten::mm" in funcol.sharding.operators()
