"""decision_counts(): how many sharding decisions C++ makes under funcol.install(), and why PyTorch others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _StridedShard
from versions import needs_decisions_in_cpp

import funcol
from funcol.installation import decision_counts, forget_decision_counts

WORLD = 8

pytestmark = [
    pytest.mark.usefixtures("fake_world"),
    needs_decisions_in_cpp,
]

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _counted_anew() -> Iterator[None]:
    with funcol.installed():
        forget_decision_counts()
        yield
    forget_decision_counts()


def on(mesh: DeviceMesh, shape: tuple[int, ...], *placements: Placement, order: Any = None) -> DTensor:
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    spec = DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=order)
    local = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, (Shard, _StridedShard)):
            local[placement.dim] = -(-local[placement.dim] // mesh.size(axis))
    return DTensor(torch.zeros(local), spec, requires_grad=False)  # type: ignore[call-arg]


@pytest.fixture
def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(8).view(2, 4))


@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
def test_sums_with_partials_of_every_kind_are_decided_in_cpp(mesh: DeviceMesh, kind: str) -> None:
    x = on(mesh, (8, 8), Partial(kind), Shard(0))
    assert (x + x).shape == (8, 8)
    assert decision_counts() == {"aten.add.Tensor": {"C++": 1}}


def test_uneven_sizes_are_decided_in_cpp(mesh: DeviceMesh) -> None:
    x, y = on(mesh, (7, 9), Shard(0), Replicate()), on(mesh, (7, 9), Replicate(), Replicate())
    assert (x + y).placements == (Shard(0), Replicate())
    assert decision_counts() == {"aten.add.Tensor": {"C++": 1}}


def test_views_and_products_with_strided_shards_are_decided_in_cpp(mesh: DeviceMesh) -> None:
    x = on(mesh, (4, 8, 6), Shard(0), Shard(1))
    flat = x.view(32, 6)
    assert flat.placements == (Shard(0), _StridedShard(0, split_factor=2))
    assert torch.mm(flat, on(mesh, (6, 4), Replicate(), Shard(1))).shape == (32, 4)
    assert {reason for counts in decision_counts().values() for reason in counts} == {"C++"}


def test_tensors_cut_in_another_order_are_decided_in_cpp(mesh: DeviceMesh) -> None:
    x = on(mesh, (8, 8), Shard(0), Shard(0), order=(ShardOrderEntry(0, (1, 0)),))
    assert (x + 1).shape == (8, 8)
    assert set(decision_counts()["aten.add.Tensor"]) == {"C++"}


def test_a_decision_that_is_remembered_counts_once(mesh: DeviceMesh) -> None:
    x = on(mesh, (8, 8), Partial(), Shard(0))
    for _ in range(3):
        torch.neg(x)
    assert decision_counts() == {"aten.neg.default": {"C++": 1}}


def test_a_rule_of_the_program_for_the_whole_mesh_is_pytorchs_to_apply(mesh: DeviceMesh) -> None:
    library = torch.library.Library("counted", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    op = torch.ops.counted.twice.default
    register_sharding(op)(lambda x: [([Shard(0)], [Shard(0)])])
    try:
        assert op(on(mesh, (8, 8), Shard(0), Shard(0))).placements == (Shard(0), Shard(0))
        assert decision_counts()["counted.twice.default"] == {"rule": 1}
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def test_an_error_of_pytorchs_is_raised_and_counted(mesh: DeviceMesh) -> None:
    with pytest.raises(Exception, match="reduction dim"):
        torch.mm(on(mesh, (8, 8), Shard(0), Replicate()), on(mesh, (6, 8), Replicate(), Replicate()))
    assert set(decision_counts()["aten.mm.default"]) == {"metas"}


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_another_learning_rate_is_no_other_decision(
    mesh: DeviceMesh, optimizer: Any, implementation: str
) -> None:
    parameters = [torch.nn.Parameter(on(mesh, (8, 8), Shard(0), Shard(1))) for _ in range(3)]
    updates = optimizer(parameters, **{implementation: True}, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(updates, total_iters=8)
    counts = []
    for _ in range(5):
        for parameter in parameters:
            parameter.grad = on(mesh, (8, 8), Shard(0), Shard(1))
        updates.step()
        schedule.step()
        counts.append(sum(sum(found.values()) for found in decision_counts().values()))
    assert counts[0] > 0
    assert counts[2:] == [counts[1]] * 3
