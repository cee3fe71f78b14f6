"""``load_full_state_dict`` of DTensors: from shards straight into those of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_full_tensor import mesh_of_ranks
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import funcol

ON_DEVICES = True


def whole(name: str) -> Tensor:
    return torch.arange(48.0).view(8, 6) + len(name)


class Model(nn.Module):
    """Parameters on all ranks, ``a`` and ``b``, and a plain buffer, ``c``."""

    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, placements in (("a", [Shard(0)]), ("bb", [Shard(1)])):
            zeros = torch.zeros(8, 6, dtype=dtype, device=mesh.device_type)
            setattr(self, name, nn.Parameter(distribute_tensor(zeros, mesh, placements)))
        self.register_buffer("ccc", torch.zeros(8, 6, dtype=dtype, device=mesh.device_type))

    def wrong(self) -> list[str]:
        held = funcol.full_state_dict(self, to=None)
        return [
            name for name, value in held.items() if not torch.equal(value.cpu().float(), whole(name).cpu())
        ]


def sharded(name: str, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(whole(name).to(mesh.device_type), mesh, placements, src_data_rank=None)


def loads(rank: int, world: int, ranks: tuple[int, ...], shape: tuple[int, ...], bucket_bytes: int) -> Any:
    model, mesh = Model(mesh_of_ranks((world,), tuple(range(world)))), mesh_of_ranks(shape, ranks)
    placements: list[Placement] = [Shard(1), Shard(0)][: mesh.ndim]
    tensors: dict[str, Tensor] = {}
    if rank in ranks:
        tensors = {name: sharded(name, mesh, placements) for name in ("a", "ccc")}
    if rank == 0:
        tensors["bb"] = whole("bb")
    found = funcol.load_full_state_dict(model, tensors, bucket_bytes=bucket_bytes)
    return model.wrong(), found.missing_keys, found.unexpected_keys


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize(("ranks", "shape"), [((0, 1, 2, 3), (2, 2)), ((0, 1), (2,)), ((2, 3), (2,))])
def test_shards_on_any_mesh_are_loaded_beside_whole_tensors(
    ranks: tuple[int, ...], shape: tuple[int, ...], bucket_bytes: int
) -> None:
    assert run_ranks(loads, 4, ranks, shape, bucket_bytes) == [([], [], [])] * 4


def loads_by_other_names(rank: int, world: int) -> Any:
    mesh = mesh_of_ranks((world,), tuple(range(world)))
    model = Model(mesh, torch.bfloat16)
    tensors = {f"m.{name}": sharded(name, mesh, [Shard(1)]) for name in ("a", "bb", "ccc")}
    names = {name.removeprefix("m."): name for name in tensors}
    funcol.load_full_state_dict(model, tensors, names=names)
    return model.wrong()


def test_shards_have_names_and_dtypes_of_their_own() -> None:
    assert run_ranks(loads_by_other_names, 2) == [[], []]


def a_whole_tensor_of_src_comes_first(rank: int, world: int) -> Any:
    mesh = mesh_of_ranks((world,), tuple(range(world)))
    model = Model(mesh)
    tensors: Any = {name: sharded("another", mesh, [Shard(0)]) for name in ("a", "bb", "ccc")}
    if rank == 0:
        tensors = {name: whole(name) for name in ("a", "bb", "ccc")}
    funcol.load_full_state_dict(model, tensors)
    return model.wrong()


def test_shards_of_other_ranks_give_way_to_whole_tensors_of_src() -> None:
    assert run_ranks(a_whole_tensor_of_src_comes_first, 2) == [[], []]


def loads_stages(rank: int, world: int) -> Any:
    """Each pair of ranks has a model of its own, with other values under the same names."""
    first = rank // 2 * 2
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("pp", "tp"))["tp"]
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)], src_data_rank=None))
    given = distribute_tensor(torch.full((4, 4), float(first)), mesh, [Shard(1)], src_data_rank=None)
    funcol.load_full_state_dict(model, {"weight": given} if first else {"weight": given.full_tensor()}, first)
    return model.weight.to_local().unique().tolist()


@pytest.mark.cpu_only
def test_stages_load_shards_of_their_own() -> None:
    assert run_ranks(loads_stages, 6) == [[0.0], [0.0], [2.0], [2.0], [4.0], [4.0]]


def differ(rank: int, world: int, which: str) -> list[str]:
    mesh = mesh_of_ranks((world,), tuple(range(world)))
    model = Model(mesh)
    tensors = {name: sharded(name, mesh, [Shard(0)]) for name in ("a", "bb", "ccc")}
    before = model.a.to_local().clone()
    given = dict(tensors)
    if which == "presence" and rank == 1:
        del given["bb"]
    if which == "placements" and rank == 1:
        given["bb"] = sharded("bb", mesh, [Shard(1)])
    if which == "replicas" and rank == 1:
        given["bb"] = sharded("bb", mesh, [Replicate()])
    if which == "shape":
        given["bb"] = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"funcol::load_full_state_dict: .*'bb'"):
        funcol.load_full_state_dict(model, given)
    assert torch.equal(model.a.to_local(), before)  # nothing was sent
    funcol.load_full_state_dict(model, tensors)  # the ranks are still in step
    return model.wrong()


@pytest.mark.cpu_only
@pytest.mark.parametrize("which", ["presence", "placements", "replicas", "shape"])
def test_all_ranks_raise_before_anything_is_sent(which: str) -> None:
    assert run_ranks(differ, 3, which) == [[]] * 3
