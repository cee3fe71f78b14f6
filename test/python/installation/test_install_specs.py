"""Under funcol.install(), a program that writes to a DTensor's spec changes that DTensor alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _dtensor_spec as stock_spec
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import funcol

WORLD = 2

pytestmark = pytest.mark.usefixtures("fake_world")


def cut(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0)])


def with_gradient(mesh: DeviceMesh, use: Callable[[DTensor], torch.Tensor]) -> list[DTensor]:
    x = cut(mesh).requires_grad_()
    use(x).square().sum().backward()
    assert isinstance(x.grad, DTensor)
    return [x, x.grad]


# Each gives DTensors of equal specs.
MAKERS: dict[str, Callable[[DeviceMesh], list[DTensor]]] = {
    "from_local": lambda mesh: [DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)]) for _ in range(2)],
    "distribute_tensor": lambda mesh: [cut(mesh), cut(mesh)],
    "redistribute": lambda mesh: [cut(mesh).redistribute(placements=[Replicate()]) for _ in range(2)],
    "redistribute to where it is": lambda mesh: (lambda x: [x, x.redistribute(placements=[Shard(0)])])(
        cut(mesh)
    ),
    "redistribute_many": lambda mesh: funcol.redistribute_many([cut(mesh), cut(mesh)], [Replicate()]),
    "funcol.redistribute": lambda mesh: [
        funcol.redistribute(cut(mesh), placements=[Replicate()], forward_dtype=torch.float64)
        for _ in range(2)
    ],
    "an operator's argument and result": lambda mesh: (lambda x: [x, x + 1])(cut(mesh)),
    "results of two operators": lambda mesh: (lambda x: [x + 1, x * 2])(cut(mesh)),
    "results of one operator": lambda mesh: list(cut(mesh).split(2, 1)),
    "a list's elements": lambda mesh: list(torch._foreach_add([cut(mesh), cut(mesh)], 1)),
    "gradient of to_local": lambda mesh: with_gradient(mesh, lambda x: x.to_local()),
    "gradient of redistribute": lambda mesh: with_gradient(
        mesh, lambda x: x.redistribute(placements=[Replicate()])
    ),
    "local_map": lambda mesh: [
        funcol.local_map.apply_local_map(lambda x: x + 1, out_placements=[Shard(0)])(cut(mesh))
        for _ in range(2)
    ],
}


@pytest.mark.parametrize("mesh", ["2"], indirect=True)
@pytest.mark.parametrize("maker", MAKERS)
def test_each_dtensor_has_a_spec_of_its_own(mesh: DeviceMesh, maker: str) -> None:
    with funcol.installed():
        first, *others = MAKERS[maker](mesh)
        assert others
        placements = [other.placements for other in others]
        first._spec.placements = (Partial(),)
        assert [other.placements for other in others] == placements


@pytest.mark.parametrize("mesh", ["2"], indirect=True)
@pytest.mark.parametrize("maker", ["from_local", "distribute_tensor", "redistribute", "local_map"])
def test_what_was_written_to_a_spec_is_in_no_later_one(mesh: DeviceMesh, maker: str) -> None:
    with funcol.installed():
        first = MAKERS[maker](mesh)[0]
        placements = first.placements
        first._spec.placements = (Partial(),)
        assert all(later.placements == placements for later in MAKERS[maker](mesh))


@pytest.mark.parametrize("mesh", ["2"], indirect=True)
def test_a_decision_keeps_no_argument_s_own_spec(mesh: DeviceMesh) -> None:
    with funcol.installed():
        x, y = cut(mesh), distribute_tensor(torch.ones(8, 4), mesh, [Shard(1)])
        wanted = (x + y).placements  # one of the two moves
        for one in (x, y):
            one._spec.placements = (Partial(),)
        x, y = cut(mesh), distribute_tensor(torch.ones(8, 4), mesh, [Shard(1)])
        total = x + y
        assert total.placements == wanted
        assert total.to_local().shape == (x + x if wanted == (Shard(0),) else y + y).to_local().shape


@pytest.mark.parametrize("mesh", ["2"], indirect=True)
def test_local_map_follows_what_is_written_to_a_spec(mesh: DeviceMesh) -> None:
    passed = funcol.local_map.apply_local_map(
        lambda x: x.clone(), out_placements=[Shard(0)], in_placements=([Shard(0)],)
    )
    x = DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)])
    passed(x)
    x._spec.placements = (Partial(),)
    with pytest.raises(ValueError, match="Partial"):
        passed(x)


def specs_of_many_kinds() -> list[Any]:
    mesh = init_device_mesh("cpu", (WORLD, 1))
    metas = [
        None,
        TensorMeta(torch.Size([4, 4]), (4, 1), torch.float32),
        TensorMeta(torch.Size([4, 4]), (1, 4), torch.float32),
        TensorMeta(torch.Size([4, 4]), (4, 1), torch.float64),
    ]
    layouts = [(Shard(0), Replicate()), (Shard(0), Shard(0)), (Partial("sum"), Shard(1))]
    specs: list[Any] = [DTensorSpec(mesh, one, tensor_meta=meta) for one in layouts for meta in metas]
    if hasattr(DTensorSpec, "compute_default_shard_order"):
        order = (stock_spec.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        specs.append(DTensorSpec(mesh, layouts[1], tensor_meta=metas[1], shard_order=order))
    return [*specs, *(copy.copy(spec) for spec in specs), None, 3, specs[0].placements]


def test_specs_compare_and_hash_as_pytorchs_do() -> None:
    specs = specs_of_many_kinds()
    expected = [[one == other for other in specs] for one in specs]
    hashes = [hash(spec) for spec in specs]
    before = DTensorSpec.__eq__, DTensorSpec.__hash__
    with funcol.installed():
        assert (DTensorSpec.__eq__, DTensorSpec.__hash__) != before
        fresh = specs_of_many_kinds()
        assert [[one == other for other in fresh] for one in fresh] == expected
        assert [[one == other for other in specs] for one in fresh] == expected
        assert [hash(spec) for spec in fresh] == hashes
    assert (DTensorSpec.__eq__, DTensorSpec.__hash__) == before


class OwnShard(Shard):
    """A program's placement, which compares as Shard does."""


def test_placements_compare_as_pytorchs_do() -> None:
    def one_of_each() -> list[object]:
        shards = [Shard(0), Shard(1), _StridedShard(0, split_factor=1), _StridedShard(0, split_factor=2)]
        subclasses = [OwnShard(0), _MaskPartial(offset_shape=torch.Size([2]), offset_dim=0)]
        return [*shards, *subclasses, Replicate(), Partial(), Partial("max"), None, "S0", 0]

    placements = [*one_of_each(), *one_of_each()]

    def compared() -> list[tuple[bool, bool]]:
        return [(one == other, one != other) for one in placements for other in placements]

    expected, hashes = compared(), [hash(one) for one in placements]
    assert "__eq__" not in vars(Shard)
    for _ in range(2):  # put again after it was taken
        with funcol.installed():
            assert "__eq__" in vars(Shard)
            assert compared() == expected
            assert [hash(one) for one in placements] == hashes
        assert "__eq__" not in vars(Shard)
        assert compared() == expected


def test_a_comparison_of_placements_that_a_program_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def equals(self: Shard, other: object) -> bool:
        return True

    monkeypatch.setattr(Shard, "__eq__", equals, raising=False)
    with funcol.installed():
        assert vars(Shard)["__eq__"] is equals
        assert Shard(0) == Replicate()
    assert vars(Shard)["__eq__"] is equals


def test_a_comparison_that_a_program_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def equals(self: DTensorSpec, other: object) -> bool:
        return False

    monkeypatch.setattr(DTensorSpec, "__eq__", equals)
    with funcol.installed():
        assert DTensorSpec.__eq__ is equals
    assert DTensorSpec.__eq__ is equals
