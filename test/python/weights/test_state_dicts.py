"""State dicts of whole tensors: out of a sharded model, into one, and beside PyTorch's checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import device_type, on_ranks, run_ranks
from sharded import mesh_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import funcol
from funcol import full_state_dict, load_full_state_dict

ON_DEVICES = True


class Model(nn.Module):
    """With odd sizes, a norm, buffers, and a head that is tied to the embedding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(seed)
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            for tensor in self.state_dict().values():
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    tensor.copy_(torch.rand(tensor.shape, generator=generator, device="cpu"))

    def get_extra_state(self) -> dict[str, int]:
        return {"seed": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seed": 7}


KINDS = ["plain", "fsdp", "tensor parallel", "fsdp and tensor parallel", "hybrid"]


def model_of(kind: str, seed: int, world: int) -> nn.Module:
    model = Model(seed).to(device_type())
    if kind == "plain":
        return model
    if "tensor" in kind:
        mesh = mesh_of((2, 2))["b"] if kind.startswith("fsdp") else mesh_of((world,))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "fsdp" in kind:
        data = mesh_of((2, 2))["a"] if "tensor" in kind else mesh_of((world,))
        fully_shard(model, mesh=data)
    if kind == "hybrid":
        fully_shard(model, mesh=mesh_of((2, 2)))
    return model


@pytest.mark.parametrize("to", [None, 1], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_the_state_dict_has_whole_tensors(rank: int, world: int, kind: str, to: int | None) -> None:
    model = model_of(kind, 1, world)
    expected = Model(1).state_dict()
    state = full_state_dict(model, to=to, bucket_bytes=100)
    if to not in (None, rank):
        assert state == {}
        return
    assert list(state) == list(expected)
    for name, whole in expected.items():
        if isinstance(whole, Tensor):
            assert torch.equal(state[name].cpu(), whole.cpu()), name
            assert type(state[name]) in (Tensor, nn.Parameter)
    assert state["_extra_state"] == {"seed": 7}
    assert state["head.weight"] is state["embedding.weight"]
    model.load_state_dict(model.state_dict())
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local.zero_()
    assert torch.equal(state["norm.weight"].cpu(), expected["norm.weight"].cpu())  # memory of its own


@on_ranks(3)
def test_the_state_dict_is_that_of_pytorch(rank: int, world: int) -> None:
    model = model_of("fsdp", 1, world)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    stock = get_model_state_dict(model, options=options)
    state = full_state_dict(model, to=0, device="cpu")
    assert {*stock} == {*state} if rank == 0 else stock == state == {}
    for name, whole in stock.items():
        assert not isinstance(whole, Tensor) or torch.equal(state[name], whole)


def whole_state(seed: int) -> dict[str, Tensor]:
    return {name: value for name, value in Model(seed).state_dict().items() if isinstance(value, Tensor)}


def pairs_of(state: dict[str, Tensor], in_order: bool) -> Iterator[tuple[str, Tensor]]:
    names = list(state) if in_order else [*reversed(state)]
    for name in names:
        yield name, state[name].double() if state[name].is_floating_point() else state[name]


@pytest.mark.parametrize("given", ["mapping", "in order", "reversed"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_what_is_loaded_from_one_rank_is_there(rank: int, world: int, kind: str, given: str) -> None:
    model = model_of(kind, 2, world)
    before = {name: value for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    state = whole_state(1)
    tensors = state if given == "mapping" else pairs_of(state, given == "in order")
    load_full_state_dict(model, tensors if rank == 1 else None, src=1, bucket_bytes=100)
    after = model.state_dict()
    for name, tensor in before.items():
        assert after[name]._spec == tensor._spec
        assert after[name].to_local().untyped_storage()._cdata == tensor.to_local().untyped_storage()._cdata
    for name, whole in full_state_dict(model, to=None).items():
        assert name == "_extra_state" or torch.equal(whole.cpu(), state[name].cpu()), name


@pytest.mark.parametrize("which", ["missing", "unknown", "shape"])
@on_ranks(2)
def test_wrong_tensors_are_refused_on_all_ranks(rank: int, world: int, which: str) -> None:
    model = model_of("fsdp", 2, world)
    state = whole_state(1)
    if which == "missing":
        del state["up.bias"]
    elif which == "unknown":
        state["more"] = torch.ones(1)
    else:
        state["up.bias"] = torch.ones(10)
    complaint = {
        "missing": "'up.bias' of the model is missing",
        "unknown": "the model has no tensor 'more'",
        "shape": r"'up.bias' has shape \(10,\), in the model \(9,\)",
    }[which]
    with pytest.raises(
        *((ValueError,) if rank == 0 else (RuntimeError,)), match=complaint if rank == 0 else "rank 0 left"
    ):
        load_full_state_dict(model, state if rank == 0 else None, bucket_bytes=100)
    total = torch.ones(1)
    dist.all_reduce(total)  # the ranks are in step
    assert total.item() == world


NO_MODULE = {
    "full_state_dict": lambda state: full_state_dict(state),
    "load_full_state_dict": lambda state: load_full_state_dict(state, state),
    "full_optimizer_state_dict": lambda state: funcol.full_optimizer_state_dict(state, state),
    "load_full_optimizer_state_dict": lambda state: funcol.load_full_optimizer_state_dict(
        state, state, state
    ),
}


@pytest.mark.parametrize("function", NO_MODULE)
@on_ranks(2)
def test_what_is_no_module_is_refused(rank: int, world: int, function: str) -> None:
    with pytest.raises(
        TypeError, match=f"funcol::{function}: the model is a dict, expected a torch.nn.Module"
    ):
        NO_MODULE[function]({"up.bias": torch.ones(2)})
    total = torch.ones(1)
    dist.all_reduce(total)  # the ranks are in step
    assert total.item() == world


def loads_a_part(rank: int, world: int, given: str) -> tuple[list[str], list[str]]:
    model = model_of("fsdp", 2, world)
    before = {
        name: whole for name, whole in full_state_dict(model, to=None).items() if name != "_extra_state"
    }
    state = {**whole_state(1), "more": torch.ones(1), "another": torch.ones(2)}
    for name in ("up.bias", "norm.weight", "embedding.weight"):
        del state[name]  # the last one is tied to another one
    tensors = state if given == "mapping" else iter(state.items())
    found = load_full_state_dict(model, tensors if rank == 1 else None, src=1, strict=False, bucket_bytes=100)
    expected = {**before, **state, "embedding.weight": state["head.weight"]}
    for name, whole in full_state_dict(model, to=None).items():
        assert name == "_extra_state" or torch.equal(whole.cpu(), expected[name].cpu()), name
    if given == "pairs":
        with pytest.raises((ValueError, RuntimeError), match=r"the model has no tensor 'more'|rank 1 left"):
            load_full_state_dict(model, iter(state.items()) if rank == 1 else None, src=1)
    return found


@pytest.mark.parametrize("given", ["mapping", "pairs"])
def test_with_strict_false_a_part_is_loaded_and_names_are_returned_on_all_ranks(given: str) -> None:
    for found in run_ranks(loads_a_part, 2, given):
        assert found.missing_keys == ["embedding.weight", "up.bias", "norm.weight"]
        assert found.unexpected_keys == ["more", "another"]


@pytest.mark.parametrize("given", ["mapping", "pairs"])
@pytest.mark.parametrize("by", ["mapping", "function"])
@on_ranks(4)
def test_names_and_dtypes_are_those_that_are_asked_for(rank: int, world: int, by: str, given: str) -> None:
    model = model_of("fsdp and tensor parallel", 2, world)
    state = whole_state(1)

    def to_theirs(name: str) -> str:
        return "model." + name.replace("up", "gate")

    names: Any = {name: to_theirs(name) for name in state} if by == "mapping" else to_theirs
    theirs = {to_theirs(name): value for name, value in state.items()}
    source = theirs if given == "mapping" else iter([*theirs.items()][::-1])
    found = load_full_state_dict(model, source if rank == 0 else None, names=names, bucket_bytes=100)
    assert found == ([], [])
    exported = full_state_dict(model, to=None, names=names, bucket_bytes=100)
    assert exported.pop("_extra_state") == {"seed": 7}
    assert list(exported) == list(theirs)
    assert all(torch.equal(exported[name].cpu(), theirs[name].cpu()) for name in theirs)
    kept = full_state_dict(
        model,
        to=0,
        names=lambda name: None if "norm" in name else name,
        dtype={"up.weight": torch.bfloat16, "down.weight": torch.float64},
    )
    if rank == 0:
        assert not any("norm" in name for name in kept)
        dtypes = {name: kept[name].dtype for name in ("up.weight", "down.weight", "up.bias")}
        assert [*dtypes.values()] == [torch.bfloat16, torch.float64, torch.float32]
        assert torch.equal(kept["up.weight"].cpu(), state["up.weight"].bfloat16().cpu())


class Pair(nn.Module):
    """Two weights and a bias under given placements."""

    def __init__(self, mesh: DeviceMesh, placements: list[list[object]], seed: int) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(seed)
        for name, shape, of_tensor in zip("abc", [(7, 5), (4, 6), (5,)], placements, strict=True):
            whole = torch.rand(shape, generator=generator, device="cpu").to(device_type())
            tensor = distribute_tensor(whole, mesh, of_tensor)  # type: ignore[arg-type]
            setattr(self, name, nn.Parameter(tensor))


def goes_through_a_checkpoint(rank: int, world: int, folder: str, installed: bool) -> None:
    source_mesh, target_mesh = mesh_of((2, 2)), mesh_of((4,))
    source_placements: list[list[object]] = [
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(0)],
    ]
    target_placements: list[list[object]] = [[Shard(1)], [Replicate()], [Shard(0)]]
    with funcol.installed() if installed else torch.no_grad():
        saved = Pair(source_mesh, source_placements, 1)
        dcp.save(saved.state_dict(), checkpoint_id=folder)
        by_dcp = Pair(target_mesh, target_placements, 2)
        state = by_dcp.state_dict()
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(by_dcp, state)
        # The same by funcol: from the checkpoint to the first mesh, whole on one rank, to the second mesh.
        again = Pair(source_mesh, source_placements, 3)
        state = again.state_dict()
        dcp.load(state, checkpoint_id=folder)
        by_funcol = Pair(target_mesh, target_placements, 4)
        load_full_state_dict(by_funcol, full_state_dict(again, to=0), src=0)
    for name, tensor in by_dcp.state_dict().items():
        moved = by_funcol.state_dict()[name]
        assert moved._spec == tensor._spec
        assert torch.equal(moved.to_local(), tensor.to_local())
        assert type(moved) is DTensor


@pytest.mark.cpu_only
@pytest.mark.parametrize("installed", [False, True])
def test_a_checkpoint_on_another_mesh_equals_pytorchs(installed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(goes_through_a_checkpoint, 4, str(Path(folder) / "saved"), installed)


def layers_on(meshes: list[DeviceMesh | None]) -> nn.Sequential:
    torch.manual_seed(1)
    # PyTorch shares specs, and with them meshes, between weights of one shape.
    model = nn.Sequential(*(nn.Linear(3 + place, 4 + place) for place in range(len(meshes))))
    for layer, mesh in zip(model, meshes, strict=True):
        fully_shard(layer, mesh=mesh)
    return model


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_equal_meshes_are_one_mesh(rank: int, world: int) -> None:
    """The first rank has one object for each layer, the others one object for all."""
    shared = mesh_of((world,))
    layers = [None if rank == 0 else shared] * 6
    expected = {name: weight.full_tensor() for name, weight in layers_on([shared] * 6).state_dict().items()}
    model = layers_on(layers)
    assert len({id(weight.device_mesh) for weight in model.parameters()}) == (6 if rank == 0 else 1)
    num_agreements = []
    for options in ({}, {"bucket_bytes": 1}):
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as agreed:
            found = full_state_dict(model, **options)
        num_agreements.append(agreed.call_count)
        assert found.keys() == (expected.keys() if rank == 0 else set())
        assert all(torch.equal(found[name].cpu(), expected[name].cpu()) for name in found)
    assert num_agreements == [3, 14]  # one at the start, for each bucket and at the end
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    load_full_state_dict(model, expected if rank == 0 else {}, src=0)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight.full_tensor(), expected[name])
    with funcol.installed():
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 2
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    torch.testing.assert_close(
        norm, 2 * torch.linalg.vector_norm(torch.cat([one.flatten() for one in expected.values()]))
    )
