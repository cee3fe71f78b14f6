"""Norms of cut tensors: what is pending, and that it is reduced to the norm of the whole."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import Layout, layouts, local_of, mesh_of, shard_of
from simulated import Call, Simulation, all_layouts, layouts_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops._math_ops import _NormPartial

from funcol.redistribution import redistribute_local_tensor
from funcol.sharding import ShardingPropagator

aten = torch.ops.aten

WORLD = 4
ORDERS = [2, 1.0, 0.5, -1, 0, math.inf, -math.inf]


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


FORMS = {
    "of_all": lambda x, order: Call(aten.linalg_vector_norm.default, (x, order), {}),
    "of_a_dim": lambda x, order: Call(aten.linalg_vector_norm.default, (x, order, [-1]), {}),
    "of_kept_dims": lambda x, order: Call(aten.linalg_vector_norm.default, (x, order, [0], True), {}),
    "by_its_old_name": lambda x, order: Call(aten.norm.Scalar, (x, order), {}),
    "of_each": lambda x, order: Call(aten._foreach_norm.Scalar, ([x, x[:, :3]], order), {}),
}


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mesh", ["2", "2x2"], indirect=True)
@pytest.mark.parametrize("order", ORDERS, ids=repr)
@pytest.mark.parametrize("shape", [(4, 8), (5, 3)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_is_the_same_on_shards(
    propagator: ShardingPropagator, mesh: DeviceMesh, form: str, shape: tuple[int, ...], order: float
) -> None:
    call = FORMS[form](numbers(*shape), order)
    for chosen in all_layouts(call, mesh.ndim, most=20):
        Simulation(propagator, mesh, call, chosen).check()


PENDING = [
    (2, _NormPartial(2)),
    (2.0, _NormPartial(2.0)),
    (-1.5, _NormPartial(-1.5)),
    (0, Partial("sum")),
    (math.inf, Partial("max")),
    (-math.inf, Partial("min")),
]


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mesh", ["2"], indirect=True)
@pytest.mark.parametrize(("order", "pending"), PENDING, ids=repr)
def test_a_norm_over_a_cut_dim_is_pending_as_pytorchs(
    propagator: ShardingPropagator, mesh: DeviceMesh, order: float, pending: Partial
) -> None:
    simulation = Simulation(propagator, mesh, FORMS["of_all"](numbers(4, 8), order), layouts("S1"))
    spec: Any = simulation.check().output_spec
    assert [str(placement) for placement in spec.placements] == [str(pending)]
    assert spec.placements == (pending,)


def reduces(rank: int, world: int, mesh_shape: tuple[int, ...], order: float, target: str) -> Counter[str]:
    """Counts the pending reductions of a norm, by their reduce op."""
    mesh, whole = mesh_of(mesh_shape), numbers(5, 4)
    at = mesh.get_coordinate()
    assert at is not None
    pending: Counter[str] = Counter()
    for layout in layouts_of(whole, mesh.ndim, ["Pavg"]):
        call = FORMS["of_a_dim"](whole, order)
        schema = Simulation(ShardingPropagator(), mesh, call, [layout]).schema()
        decision = ShardingPropagator().propagate_op_sharding(schema)
        wanted = (decision.redistribute_schema or schema).args_schema[0]
        assert isinstance(wanted, DTensorSpec)
        assert isinstance(decision.output_spec, DTensorSpec)
        local = redistribute_local_tensor(
            local_of(whole, layout, mesh_shape, at), layout.spec(mesh, whole), wanted
        )
        expected = call.op(*call.args)
        to = Layout((target,) * mesh.ndim)
        held = call.op(local, *call.args[1:])
        result = redistribute_local_tensor(held, decision.output_spec, to.spec(mesh, expected))
        assert torch.allclose(result, shard_of(expected, to, mesh_shape, at)), str(layout)
        pending.update(type(placement).__name__ for placement in decision.output_spec.placements)
    return pending


@pytest.mark.parametrize("order", [2, 3.0, -1, 0, math.inf], ids=repr)
@pytest.mark.parametrize("target", ["R", "S0"])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_a_pending_norm_is_reduced_to_that_of_the_whole(
    mesh_shape: tuple[int, ...], target: str, order: float
) -> None:
    world = torch.Size(mesh_shape).numel()
    for pending in run_ranks(reduces, world, mesh_shape, order, target):
        assert pending["Partial" if order in (0, math.inf) else "_NormPartial"] > 0
