"""funcol.sharding.ShardingPropagator: decisions and their cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded import Layout
from specs import placements, spec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._op_schema import OpSchema

from funcol.sharding import ShardingPropagator

aten = torch.ops.aten

WORLD = 8
pytestmark = pytest.mark.usefixtures("fake_world")


# Decisions


def test_matching_inputs_stay(propagator: ShardingPropagator, grid: DeviceMesh) -> None:
    schema = OpSchema(aten.mm.default, (spec(grid, (8, 16), "S0 S1"), spec(grid, (16, 4), "R S0")), {})
    sharding = propagator.propagate_op_sharding(schema)
    assert placements(sharding) == (Shard(0), Partial("sum"))
    assert (sharding.needs_redistribute, sharding.redistribute_schema) == (False, None)


def test_what_has_to_move_is_in_the_schema(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    x, y = spec(line, (64, 8), "S0"), spec(line, (64, 8), "R")
    sharding = propagator.propagate_op_sharding(OpSchema(aten.add.Tensor, (x, y), {"alpha": 2}))
    assert sharding.needs_redistribute
    assert placements(sharding) == (Shard(0),)
    suggested = sharding.redistribute_schema
    assert [each.placements for each in suggested.args_schema] == [(Shard(0),), (Shard(0),)]
    assert suggested.kwargs_schema == {"alpha": 2}


def test_outputs_say_what_they_look_like(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    schema = OpSchema(aten.t.default, (spec(line, (16, 8), "S0"),), {})
    meta = propagator.propagate_op_sharding(schema).output_spec.tensor_meta
    assert meta == TensorMeta(torch.Size((8, 16)), (1, 8), torch.float32)


def test_several_outputs_are_a_tuple(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    schema = OpSchema(aten.max.dim, (spec(line, (16, 8), "S0"), 1), {})
    outputs = propagator.propagate_op_sharding(schema).output_spec
    assert [each.tensor_meta.dtype for each in outputs] == [torch.float32, torch.int64]
    assert {each.placements for each in outputs} == {(Shard(0),)}


@pytest.mark.parametrize("op", [aten.mean.default, aten.mse_loss.default])
def test_averages_are_not_taken_over_uneven_shards(
    propagator: ShardingPropagator, line: DeviceMesh, op: Any
) -> None:
    x = spec(line, (12,), "S0")
    args = (x,) if op is aten.mean.default else (x, spec(line, (12,), "R"))
    sharding = propagator.propagate_op_sharding(OpSchema(op, args, {}))
    assert not any(placement.is_partial("avg") for placement in placements(sharding))


def test_a_result_that_is_no_tensor_has_no_spec(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    x = spec(line, (16, 8), "S0")
    assert propagator.propagate_op_sharding(OpSchema(aten.equal.default, (x, x), {})).output_spec is None


def test_an_output_that_is_masked_off_has_no_spec(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    x, statistics = spec(line, (16, 8), "S0"), spec(line, (16, 1), "S0")
    weight = spec(line, (8,), "R")
    args = (x, x, [8], statistics, statistics, weight, weight, [True, True, False])
    sharding = propagator.propagate_op_sharding(OpSchema(aten.native_layer_norm_backward.default, args, {}))
    assert [each and each.placements for each in sharding.output_spec] == [
        (Shard(0),),
        (Partial("sum"),),
        None,
    ]


def test_a_tensor_that_is_written_stays(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    x, y = spec(line, (16, 8), "S0"), spec(line, (16, 8), "S1")
    sharding = propagator.propagate_op_sharding(OpSchema(aten.add_.Tensor, (x, y), {}))
    assert placements(sharding) == (Shard(0),)
    assert [each.placements for each in sharding.redistribute_schema.args_schema] == [(Shard(0),)] * 2


def test_a_result_takes_the_layout_of_out(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    x = spec(line, (16, 8), "S0")
    schema = OpSchema(aten.neg.out, (x,), {"out": spec(line, (16, 8), "S1")})
    sharding = propagator.propagate_op_sharding(schema)
    assert placements(sharding) == (Shard(1),)


def test_a_factory_without_tensors_is_decided_by_its_out(
    propagator: ShardingPropagator, line: DeviceMesh
) -> None:
    sharding = propagator.propagate_op_sharding(
        OpSchema(aten.eye.m_out, (16, 8), {"out": spec(line, (16, 8), "R")})
    )
    assert placements(sharding) == (Replicate(),)
    with pytest.raises(ValueError, match=r"aten::eye\.m_out: no way to run it leaves the tensors"):
        propagator.propagate_op_sharding(
            OpSchema(aten.eye.m_out, (16, 8), {"out": spec(line, (16, 8), "S0")})
        )


def test_elements_of_a_list_are_decided_each_on_its_own(
    propagator: ShardingPropagator, line: DeviceMesh
) -> None:
    x = [spec(line, (16, 8), "S0"), spec(line, (16, 8), "S1")]
    sharding = propagator.propagate_op_sharding(OpSchema(aten._foreach_neg.default, (x,), {}))
    assert [each.placements for each in sharding.output_spec] == [(Shard(0),), (Shard(1),)]
    assert not sharding.needs_redistribute


def test_shape_arguments_become_those_of_the_rank(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    schema = OpSchema(aten.view.default, (spec(line, (16, 8), "S0"), [16, 4, 2]), {})
    sharding = propagator.propagate_op_sharding(schema)
    assert sharding.use_val_from_redistribute_schema
    assert tuple(sharding.redistribute_schema.args_schema[1]) == (2, 4, 2)


def test_an_overload_without_sizes_keeps_its_arguments(
    propagator: ShardingPropagator, line: DeviceMesh
) -> None:
    schema = OpSchema(aten.view_copy.dtype, (spec(line, (16, 8), "S0"), torch.int32), {})
    sharding = propagator.propagate_op_sharding(schema)
    assert (placements(sharding), sharding.redistribute_schema) == ((Shard(0),), None)


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.squeeze.default, ()),
        (aten.squeeze.dim, (1,)),
        (aten.squeeze.dims, ([1, -3],)),
        (aten.squeeze_copy.default, ()),
    ],
)
def test_a_dim_of_which_the_rank_holds_one_is_not_squeezed(
    propagator: ShardingPropagator, line: DeviceMesh, op: Any, args: Any
) -> None:
    schema = OpSchema(op, (spec(line, (8, 1, 3), "S0"), *args), {})
    called = propagator.propagate_op_sharding(schema).redistribute_schema or schema
    assert called.op(torch.empty(1, 1, 3), *called.args_schema[1:]).shape == (1, 3)


@pytest.mark.parametrize(
    ("op", "shape", "args"),
    [(aten.squeeze.default, (16, 1, 3), ()), (aten.squeeze.dim, (8, 1, 3), (1,))],
)
def test_a_squeeze_that_drops_the_same_dims_of_the_shard_stays(
    propagator: ShardingPropagator, line: DeviceMesh, op: Any, shape: tuple[int, ...], args: Any
) -> None:
    schema = OpSchema(op, (spec(line, shape, "S0"), *args), {})
    assert propagator.propagate_op_sharding(schema).redistribute_schema is None


def test_a_view_that_needs_data_of_other_ranks_is_redistributed(
    propagator: ShardingPropagator, line: DeviceMesh
) -> None:
    schema = OpSchema(aten.view.default, (spec(line, (12, 2), "S0"), [8, 3]), {})
    sharding = propagator.propagate_op_sharding(schema)
    assert sharding.redistribute_schema.args_schema[0].placements == (Replicate(),)


def test_a_shard_order_that_all_share_stays(propagator: ShardingPropagator, grid: DeviceMesh) -> None:
    swapped = Layout(("S0", "S0"), ((0, (1, 0)),)).spec(grid, torch.empty(16, 4))
    sharding = propagator.propagate_op_sharding(OpSchema(aten.add.Tensor, (swapped, swapped), {}))
    assert not sharding.needs_redistribute
    assert sharding.output_spec.shard_order == swapped.shard_order


def test_contradicting_shard_orders_are_not_taken_for_one(
    propagator: ShardingPropagator, grid: DeviceMesh
) -> None:
    swapped = Layout(("S0", "S0"), ((0, (1, 0)),)).spec(grid, torch.empty(16, 4))
    schema = OpSchema(aten.add.Tensor, (swapped, spec(grid, (16, 4), "S0 S0")), {})
    sharding = propagator.propagate_op_sharding(schema)
    assert len({each.shard_order for each in sharding.redistribute_schema.args_schema}) == 1


def test_strided_shards_pass_through(propagator: ShardingPropagator, grid: DeviceMesh) -> None:
    x = spec(grid, (16, 4), "_S0/4 S0")
    sharding = propagator.propagate_op_sharding(OpSchema(aten.neg.default, (x,), {}))
    assert sharding.output_spec == x


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool])
def test_dtypes_are_those_of_the_operator(
    propagator: ShardingPropagator, line: DeviceMesh, dtype: torch.dtype
) -> None:
    schema = OpSchema(aten.sum.default, (spec(line, (16, 8), "S0", dtype),), {})
    expected = torch.empty(1, dtype=dtype).sum().dtype
    assert propagator.propagate_op_sharding(schema).output_spec.tensor_meta.dtype == expected


@pytest.mark.parametrize("order", [2, float("inf")])
def test_norms_of_partial_extremes_are_of_the_whole(
    propagator: ShardingPropagator, line: DeviceMesh, order: float
) -> None:
    schema = OpSchema(aten.linalg_vector_norm.default, (spec(line, (16, 8), "Pmax"), order), {})
    suggested = propagator.propagate_op_sharding(schema).redistribute_schema
    assert not suggested.args_schema[0].placements[0].is_partial()


NORMS = [
    (aten.linalg_vector_norm.default, lambda x: (x, 2)),
    (aten._foreach_norm.Scalar, lambda x: ([x, x], 2)),
]


@pytest.mark.parametrize(("op", "arguments"), NORMS)
def test_partials_with_rules_of_their_own_stay_pytorchs(
    propagator: ShardingPropagator, line: DeviceMesh, op: Any, arguments: Any
) -> None:
    stock = DTensor._op_dispatcher.sharding_propagator
    schema = OpSchema(op, arguments(spec(line, (16, 8), "S0")), {}, stock.op_to_schema_info.get(op))
    ours, theirs = (each.propagate_op_sharding_non_cached(schema) for each in (propagator, stock))
    assert ours.output_spec == theirs.output_spec


# The cache


def test_equal_schemas_share_a_decision(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    first = propagator.propagate_op_sharding(OpSchema(aten.neg.default, (spec(line, (16, 8), "S0"),), {}))
    again = propagator.propagate_op_sharding(OpSchema(aten.neg.default, (spec(line, (16, 8), "S0"),), {}))
    assert first is again
    assert propagator.cache_info() == (1, 1, 8192, 1)


@pytest.mark.parametrize(("one", "other"), [([16, 4, 2], [4, 4, 8]), ([128], [8, 16])])
def test_sizes_among_the_arguments_tell_schemas_apart(
    propagator: ShardingPropagator, line: DeviceMesh, one: list[int], other: list[int]
) -> None:
    x = spec(line, (16, 8), "R")
    shapes = [
        propagator.propagate_op_sharding(OpSchema(aten.view.default, (x, size), {})).output_spec.shape
        for size in (one, other)
    ]
    assert [list(shape) for shape in shapes] == [one, other]


def test_values_that_cannot_matter_do_not_tell_schemas_apart(
    propagator: ShardingPropagator, line: DeviceMesh
) -> None:
    x = spec(line, (16, 8), "S0")
    for factor in (2.0, 3.0):
        propagator.propagate_op_sharding(OpSchema(aten.mul.Scalar, (x, factor), {}))
    assert propagator.cache_info().hits == 1


@pytest.mark.parametrize(
    ("op", "numbers", "kept"),
    [
        (aten.mul.Scalar, [(2.0,), (-2.0,)], [True, False]),
        (aten.div.Tensor, [(2.0,), (-2.0,)], [True, False]),
        (aten.threshold.default, [(1.0, 0.0), (1.0, 2.0)], [True, False]),
    ],
)
def test_values_that_matter_tell_schemas_apart(
    propagator: ShardingPropagator, line: DeviceMesh, op: Any, numbers: list[Any], kept: list[bool]
) -> None:
    x = spec(line, (16, 8), "Pmax")
    found = [
        placements(propagator.propagate_op_sharding(OpSchema(op, (x, *each), {}))) == (Partial("max"),)
        for each in numbers
    ]
    assert found == kept


def test_a_number_of_another_kind_may_change_the_dtype(
    propagator: ShardingPropagator, line: DeviceMesh
) -> None:
    x = spec(line, (16, 8), "S0", torch.int64)
    dtypes = [
        propagator.propagate_op_sharding(
            OpSchema(aten.mul.Scalar, (x, factor), {})
        ).output_spec.tensor_meta.dtype
        for factor in (2, 2.0)
    ]
    assert dtypes == [torch.int64, torch.float32]


def test_the_cache_is_bounded(line: DeviceMesh) -> None:
    propagator = ShardingPropagator(cache_size=3)
    for size in range(8, 16):
        propagator.propagate_op_sharding(OpSchema(aten.neg.default, (spec(line, (size, 8), "S0"),), {}))
    assert propagator.cache_info().currsize == 3


def test_a_cycle_of_twice_the_cache_still_hits(line: DeviceMesh) -> None:
    propagator = ShardingPropagator(cache_size=20)
    schemas = [OpSchema(aten.neg.default, (spec(line, (size, 8), "S0"),), {}) for size in range(8, 48)]
    for _ in range(20):
        for schema in schemas:
            decided = propagator.propagate_op_sharding(schema)
            assert decided.output_spec.shape == schema.args_schema[0].shape
    info = propagator.cache_info()
    assert info.currsize == 20
    assert info.hits > (info.hits + info.misses) / 3


def test_a_cleared_cache_is_empty(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    propagator.propagate_op_sharding(OpSchema(aten.neg.default, (spec(line, (16, 8), "S0"),), {}))
    propagator.cache_clear()
    assert propagator.propagate_op_sharding.cache_info() == (0, 0, 8192, 0)


def test_what_is_not_to_be_remembered_is_not(propagator: ShardingPropagator, line: DeviceMesh) -> None:
    schema = OpSchema(aten.neg.default, (spec(line, (16, 8), "S0"),), {})
    propagator.propagate_op_sharding_non_cached(schema)
    assert propagator.cache_info().currsize == 0
