"""Streams of weights on ranks that do not do the same: an error on all of them, before anything is sent."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import device_type, on_ranks, run_ranks
from sharded import mesh_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from funcol import full_state_dict, full_tensors, load_full_state_dict

ON_DEVICES = True


def rows(mesh: DeviceMesh, shape: tuple[int, ...] = (4, 4), dtype: torch.dtype = torch.float32) -> DTensor:
    count = torch.Size(shape).numel()
    return distribute_tensor(torch.arange(count, dtype=dtype).view(shape), mesh, [Shard(0)])


def named_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(device_type(), shape, mesh_dim_names=names)


def equal(one: Tensor | None, other: Tensor) -> bool:
    assert one is not None
    return torch.equal(one.cpu(), other.cpu())


def is_in_step(world: int) -> None:
    """No rank waits for the stream, and no message of it is left to be taken for another."""
    gc.collect()
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [world] * 3


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# Exports

EXPORTS = {
    "to": "to is 1 on rank 1, 0 on ranks 0, 2",
    "dtype option": "the dtype that is asked for of 'a' is torch.bfloat16 on rank 1, none on ranks 0, 2",
    "bucket_bytes": "bucket_bytes is 1 on rank 1, 100 on ranks 0, 2",
    "name": "tensor 1 is 'x' on rank 1, 'b' on ranks 0, 2",
    "order": "tensor 0 is 'b' on rank 1, 'a' on ranks 0, 2",
    "fewer": "tensor 1 is missing on rank 1, 'b' on ranks 0, 2",
    "none": "tensor 0 is missing on rank 1, 'a' on ranks 0, 2",
    "dtype": "the dtype of 'a' is torch.bfloat16 on rank 1, torch.float32 on ranks 0, 2",
    "shape": "the shape of 'b' is (6, 2) on rank 1, (6, 4) on ranks 0, 2",
    "placement": "the placements of 'a' is (Replicate(),) on rank 1, (Shard(dim=0),) on ranks 0, 2",
}


def exports_differ(rank: int, world: int, which: str, from_iterator: bool) -> tuple[str, str]:
    mesh = mesh_of((world,))
    local, options = torch.ones(2, 4), {"to": 0, "bucket_bytes": 100, "dtype": None}
    named = {name: DTensor.from_local(local, mesh, [Shard(0)]) for name in "ab"}
    if rank == 1:
        match which:
            case "to" | "bucket_bytes":
                options[which] = 1
            case "dtype option":
                options["dtype"] = torch.bfloat16
            case "name":
                named = {"a": named["a"], "x": named["b"]}
            case "order":
                named = {"b": named["b"], "a": named["a"]}
            case "fewer":
                del named["b"]
            case "none":
                named = {}
            case "dtype":
                named["a"] = named["a"].bfloat16()
            case "shape":
                named["b"] = DTensor.from_local(local[:, :2], mesh, [Shard(0)])
            case "placement":
                named["a"] = DTensor.from_local(torch.ones(6, 4), mesh, [Replicate()], run_check=False)
    source: Any = ((name, tensor) for name, tensor in named.items()) if from_iterator else named
    found = error_of(lambda: [*full_tensors(source, **options)])
    is_in_step(world)
    return found


@pytest.mark.parametrize("from_iterator", [False, True])
@pytest.mark.parametrize("which", EXPORTS)
def test_exports_that_differ_are_refused_on_all_ranks(which: str, from_iterator: bool) -> None:
    for kind, message in run_ranks(exports_differ, 3, which, from_iterator):
        assert kind == "ValueError", message
        assert EXPORTS[which] in message or from_iterator, message


def leaves(rank: int, world: int, when: str) -> tuple[str, str]:
    mesh = mesh_of((world,))
    named = {name: rows(mesh) for name in "abcd"}

    def failing() -> Iterator[tuple[str, Tensor]]:
        if rank == 1 and when == "at once":
            raise OSError("no such file")
        yield from named.items()

    def takes() -> None:
        with full_tensors(failing() if when == "at once" else named, bucket_bytes=1) as stream:
            for index, _ in enumerate(stream):
                if rank == 1 and when == "closes" and index == 1:
                    stream.close()
                    return
                if rank == 1 and when == "breaks" and index == 1:
                    break

    bucket_bytes: Any = 0 if rank == 1 else 1
    wrong = when == "wrong argument"
    found = error_of((lambda: [*full_tensors(named, bucket_bytes=bucket_bytes)]) if wrong else takes)
    is_in_step(world)
    return found


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        ("at once", "rank 1 left after 0 tensors: OSError: no such file"),
        (
            "wrong argument",
            "rank 1 left after 0 tensors: ValueError: funcol::full_tensors: bucket_bytes is 0",
        ),
        ("closes", "rank 1 left after 2 tensors: it closed the stream"),
        ("breaks", "rank 1 left after 2 tensors: it left the loop"),
    ],
)
def test_the_others_are_told_who_left_and_why(when: str, reason: str) -> None:
    results = run_ranks(leaves, 3, when)
    own = results.pop(1)
    assert own[0] == {"at once": "OSError", "wrong argument": "ValueError"}.get(when, "")
    assert all(kind == "RuntimeError" and reason in message for kind, message in results)


def passes_other_kinds(rank: int, world: int, which: str) -> tuple[str, str]:
    mesh = mesh_of((world,))
    named = {name: rows(mesh) for name in "ab"}
    model = nn.Module()
    model.register_buffer("a", rows(mesh))

    def call() -> None:
        if which == "function" and rank == 1:
            load_full_state_dict(model, {"a": torch.ones(4, 4)})
        elif which == "function":
            full_state_dict(model)
        else:
            [*full_tensors(iter(named.items()) if rank == 1 else named, bucket_bytes=1 << 20)]

    found = error_of(call)
    is_in_step(world)
    return found


@pytest.mark.parametrize(
    ("which", "complaint"),
    [
        ("function", "function is load_full_state_dict on rank 1, full_tensors on ranks 0, 2"),
        ("iterator", "source is an iterator on rank 1, a module, a mapping or a list on ranks 0, 2"),
    ],
)
def test_ranks_that_call_something_else_are_told(which: str, complaint: str) -> None:
    for kind, message in run_ranks(passes_other_kinds, 3, which):
        assert kind == "ValueError", message
        assert complaint in message, message


@on_ranks(4)
def test_stages_stream_in_ways_of_their_own(rank: int, world: int) -> None:
    """One stage exports by an iterator, the other by a mapping; they end after other numbers of buckets."""
    mesh = named_mesh((2, 2), ("pp", "dp"))
    stage = rank // 2
    named = {f"{stage}.{index}": rows(mesh["dp"], (4 + index, 2)) for index in range(2 + 3 * stage)}
    for kind in ("both iterators", "one iterator", "mappings"):
        is_iterator = kind == "both iterators" or (kind == "one iterator" and stage == 0)
        found = dict(full_tensors(iter(named.items()) if is_iterator else named, bucket_bytes=1))
        assert list(found) == list(named)
        assert all(equal(found[name], value.full_tensor()) for name, value in named.items())
    is_in_step(world)


@on_ranks(4)
def test_buckets_of_overlapping_meshes_do_not_wait_for_each_other(rank: int, world: int) -> None:
    first, second = DeviceMesh(device_type(), [0, 1, 2]), DeviceMesh(device_type(), [2, 3])
    pairs = [("a", first), ("b", second), ("c", first), ("d", second), ("e", second), ("f", first)]
    whole = torch.arange(12.0).view(6, 2)
    named = {}
    for name, mesh in pairs:
        place = mesh.mesh.tolist().index(rank) if rank in mesh.mesh.tolist() else None
        local = whole[:0] if place is None else whole.chunk(mesh.size())[place]
        named[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    for bucket_bytes in (1, 100, 1 << 20):
        for name, found in full_tensors(named, bucket_bytes=bucket_bytes):
            is_inside = rank in dict(pairs)[name].mesh.tolist()
            assert equal(found, whole) if is_inside else found is None
    is_in_step(world)


@on_ranks(2)
def test_nothing_is_sent_from_a_finalizer(rank: int, world: int) -> None:
    """The garbage collector takes a stream that was not closed, amid other collectives."""
    mesh = mesh_of((world,))
    named = {str(index): rows(mesh) for index in range(4)}
    for _ in range(3):
        stream = full_tensors(named, bucket_bytes=1)
        next(stream)
        cycle: list[Any] = [stream]
        cycle.append(cycle)
        del stream, cycle
        if rank == 0:
            gc.collect()
        is_in_step(world)
    assert len([*full_tensors(named)]) == 4


@pytest.mark.parametrize(
    "binds_device", [False, pytest.param(True, marks=pytest.mark.cuda)], ids=["unbound", "bound"]
)
@on_ranks(3)
def test_other_ranks_go_on_with_the_world_meanwhile(rank: int, world: int, binds_device: bool) -> None:
    """Ranks 0 and 1 stream while rank 2 makes no group and waits in a collective of the world."""
    mesh = DeviceMesh(device_type(), [0, 1])
    part = dist.new_group([0, 1])
    root = dist.distributed_c10d._get_default_group()
    if binds_device:
        dist.all_reduce(torch.ones(1, device=device_type()))
        root.bound_device_id = torch.device("cuda", torch.cuda.current_device())
    try:
        if rank < 2:
            (found,) = full_tensors({"x": rows(mesh)}, group=part)
            assert equal(found[1], torch.arange(16.0).view(4, 4))
        dist.all_reduce(torch.ones(1, device=device_type()))
    finally:
        root.bound_device_id = None
    total = torch.ones(3)
    dist.all_reduce(total, group=dist.new_group())
    assert total.tolist() == [world] * 3


@pytest.mark.parametrize("by_group", [False, True])
@on_ranks(4)
def test_stages_of_a_pipeline_load_and_export_for_themselves(rank: int, world: int, by_group: bool) -> None:
    """Two stages of a pipeline, two ranks each, with names, sizes and sources of their own."""
    mesh = named_mesh((2, 2), ("pp", "dp"))
    stage, own = rank // 2, mesh["dp"]
    group = own.get_group() if by_group else None
    model = nn.Sequential(*(nn.Linear(4, 4 + stage) for _ in range(1 + stage * 2)))
    model.register_buffer("steps", torch.zeros(()))
    names = [f"{stage}.{name}" for name in model.state_dict()]
    for layer in model:
        fully_shard(layer, mesh=own)
    holder = nn.ModuleDict({str(stage): model})
    wholes = {
        name: torch.full(value.shape, index + 10.0 * stage)
        for index, (name, value) in enumerate(holder.state_dict().items())
    }
    src = 2 * stage
    load_full_state_dict(holder, wholes if rank == src else None, src=src, bucket_bytes=64, group=group)
    found = full_state_dict(holder, to=src, bucket_bytes=64, group=group)
    assert list(found) == (names if rank == src else [])
    for name, whole in found.items():
        assert equal(whole, wholes[name]), name
    is_in_step(world)


def mesh_outside_of_group(rank: int, world: int) -> tuple[str, str]:
    named = {"a": rows(mesh_of((world,)))}
    group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return error_of(lambda: [*full_tensors({**named, str(rank): torch.ones(1)}, group=group)])


# Own values


@on_ranks(2)
def test_views_of_one_storage_have_their_own_values(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    base = torch.arange(24.0).to(device_type())
    module = nn.Module()
    views = {
        "cos": base[:6].view(2, 3),
        "sin": base[6:12].view(2, 3),
        "t": base[:6].view(3, 2).T,
        "bits": base[:6].view(torch.int32).view(2, 3),
        "conj": torch.view_as_complex(base[12:].view(6, 2)).conj(),
        "same": torch.view_as_complex(base[12:].view(6, 2)),
    }
    for name, view in views.items():
        module.register_buffer(name, view)
    local = torch.arange(6.0).view(2, 3).to(device_type())
    for name, placement in {
        "cut": Shard(0),
        "held": Replicate(),
        "again": Shard(0),
        "sums": Partial(),
    }.items():
        shared = DTensor.from_local(local, mesh, [placement], run_check=False)
        module.register_buffer(name, shared)
    found = full_state_dict(module, to=None)
    for name, view in views.items():
        assert equal(found[name], view), name
    assert equal(found["held"], local)
    assert equal(found["cut"], torch.cat([local] * world))
    assert equal(found["sums"], local * world)
    assert found["again"] is found["cut"]


@on_ranks(2)
def test_what_is_tied_on_one_rank_alone_is_not_tied(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    shared = torch.ones(2, 3)
    flat = torch.arange(2.0)
    named = {
        "a": DTensor.from_local(shared, mesh, [Shard(0)]),
        "b": DTensor.from_local(shared if rank == 0 else shared * 2, mesh, [Shard(0)]),
        # Cut out of one buffer, and empty on the last rank.
        "c": DTensor.from_local(flat[rank * 2 : rank + 1], mesh, [Shard(0)], shape=(1,), stride=(1,)),
        "d": DTensor.from_local(flat[rank + 1 :], mesh, [Shard(0)], shape=(1,), stride=(1,)),
    }
    wholes = dict(full_tensors(named))
    assert wholes["b"].sum() == 6 + 12  # type: ignore[union-attr]
    assert wholes["c"].tolist() == [0]  # type: ignore[union-attr]
    assert wholes["d"].tolist() == [1]  # type: ignore[union-attr]
    assert wholes["a"] is not wholes["b"]


@on_ranks(2)
def test_results_on_a_mesh_of_one_rank_have_memory_of_their_own(rank: int, world: int) -> None:
    mesh = DeviceMesh(device_type(), [rank])
    local = torch.ones(2, 2).to(device_type())
    ((_, whole),) = full_tensors({"a": DTensor.from_local(local, mesh, [Shard(0)])})
    assert whole is not None
    whole.zero_()
    assert local.sum() == 4


# Loads


def model_on(mesh: DeviceMesh, **kinds: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return model


def wholes_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.rand(value.shape) for name, value in model.state_dict().items()}


LOADS = {
    "src": ("ValueError", "src is 1 on rank 1, 0 on rank"),
    "bucket_bytes": ("ValueError", "bucket_bytes is 7 on rank 1, 100 on rank"),
    "model": ("ValueError", "tensor 0 is 'weight' on rank 1, '0.weight' on rank"),
    "dtype": ("ValueError", "the dtype of '0.weight' is torch.float64 on rank 1, torch.float32 on rank"),
    "wrong argument": ("RuntimeError", "rank 1 left after 0 tensors: ValueError"),
    "partial": ("RuntimeError", "rank 1 left after 0 tensors: ValueError"),
}


def loads_differ(rank: int, world: int, which: str) -> tuple[str, str]:
    mesh = mesh_of((world,))
    model: nn.Module = model_on(mesh)
    options = {"src": 0, "bucket_bytes": 100}
    wholes = wholes_of(model)
    if rank == 1:
        match which:
            case "src":
                options["src"] = 1
            case "bucket_bytes":
                options["bucket_bytes"] = 7
            case "model":
                model = fully_shard(nn.Linear(3, 4), mesh=mesh)
            case "dtype":
                model.double()
            case "wrong argument":
                options["bucket_bytes"] = 0
            case "partial":
                model.register_buffer("p", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    found = error_of(lambda: load_full_state_dict(model, wholes, **options))
    is_in_step(world)
    return found


@pytest.mark.parametrize("which", LOADS)
def test_loads_that_differ_are_refused_on_all_ranks(which: str) -> None:
    results = run_ranks(loads_differ, 3, which)
    if LOADS[which][0] == "RuntimeError":
        assert results.pop(1)[0] == "ValueError"
    for kind, message in results:
        assert kind == LOADS[which][0], message
        assert LOADS[which][1] in message, message


def bad_source(rank: int, world: int, which: str) -> tuple[str, str]:
    model = model_on(mesh_of((world,)))
    wholes: Any = wholes_of(model)
    before = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if which == "late shape":
        wholes["1.bias"] = torch.ones(9)
    elif which == "late shape of an iterator":
        wholes["1.bias"] = torch.ones(9)
        wholes = iter(wholes.items())
    elif which == "sparse":
        wholes["1.weight"] = wholes["1.weight"].to_sparse()
    elif which == "sharded in an iterator":
        alone = DeviceMesh("cpu", [rank], _init_backend=False)
        wholes["1.weight"] = DTensor.from_local(wholes["1.weight"], alone, [Shard(0)], run_check=False)
        wholes = iter(wholes.items())
    elif which == "raises":

        class Lazy(dict):  # type: ignore[type-arg]
            def __getitem__(self, name: str) -> Tensor:
                if name == "1.weight":
                    raise OSError("no such file")
                return super().__getitem__(name)  # type: ignore[no-any-return]

        wholes = Lazy(wholes)
    found = error_of(lambda: load_full_state_dict(model, wholes if rank == 0 else None, bucket_bytes=40))
    is_in_step(world)
    after = {name: value.full_tensor() for name, value in model.state_dict().items()}
    if which in ("late shape", "sparse"):
        assert all(equal(after[name], before[name]) for name in before)  # nothing is loaded
    return found


@pytest.mark.parametrize(
    ("which", "complaint"),
    [
        ("late shape", "'1.bias' has shape (9,), in the model (5,)"),
        ("late shape of an iterator", "Pass the whole tensor. Loaded are '0.weight', '0.bias', '1.weight'."),
        ("sparse", "'1.weight' is a torch.sparse_coo. Pass a dense tensor."),
        (
            "sharded in an iterator",
            "'1.weight' is a DTensor with the placements (Shard(dim=0),). Pass its full_tensor().",
        ),
        ("raises", "no such file"),
    ],
)
def test_a_source_that_cannot_be_loaded_is_told_to_all_ranks(which: str, complaint: str) -> None:
    (kind, message), *others = run_ranks(bad_source, 2, which)
    assert kind == ("OSError" if which == "raises" else "ValueError")
    assert complaint in message
    assert all(kind == "RuntimeError" and "rank 0 left after" in message for kind, message in others)


@on_ranks(3)
def test_plain_tensors_are_loaded_on_ranks_outside_of_meshes(rank: int, world: int) -> None:
    """DTensors on two ranks of three, and plain tensors, which all have."""
    mesh = DeviceMesh(device_type(), [0, 1])
    model = nn.Module()
    whole = torch.arange(8.0).view(4, 2)
    local = whole.chunk(2)[rank] * 0 if rank < 2 else whole[:0]
    spec: Any = {"run_check": False, "shape": (4, 2), "stride": (2, 1)}
    model.register_buffer("cut", DTensor.from_local(local.to(device_type()), mesh, [Shard(0)], **spec))
    model.register_buffer("plain", torch.zeros(3).to(device_type()))
    load_full_state_dict(model, {"cut": whole, "plain": torch.ones(3)} if rank == 0 else None)
    assert model.get_buffer("plain").sum() == 3
    if rank < 2:
        assert equal(model.get_buffer("cut").to_local(), whole.chunk(2)[rank])


def run_from_first(wholes: dict[str, Tensor]) -> dict[str, Tensor]:
    found: list[Any] = [wholes]
    dist.broadcast_object_list(found, 0)
    return found[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("which", ["meta", "replicated", "inference"])
@on_ranks(2)
def test_loads_of_other_kinds(rank: int, world: int, which: str) -> None:
    mesh = mesh_of((world,))
    if which == "meta":
        with torch.device("meta"):
            model = model_on(mesh)
            model.register_buffer("plain", torch.zeros(3))
        assert all(value.is_meta for value in model.state_dict().values())
    else:
        model = model_on(mesh)
    wholes = wholes_of(model)
    sources: dict[str, Tensor] = dict(wholes)
    if which == "replicated":
        sources = {
            name: DTensor.from_local(value, mesh, [Replicate()], run_check=False)
            for name, value in wholes.items()
        }
    with torch.inference_mode(mode=which == "inference"):
        load_full_state_dict(model, sources if rank == 0 else None)
    wholes = run_from_first(wholes)
    for name, whole in full_state_dict(model, to=None).items():
        assert equal(whole, wholes[name]), name
    model[1].weight.requires_grad_()


@pytest.mark.parametrize("world", [8])
@on_ranks()
def test_submeshes_of_a_stage_hold_replicas(rank: int, world: int) -> None:
    """Weights on the axis tp of pp x dp x tp: replicas on dp, other weights on the other stage."""
    mesh = named_mesh((2, 2, 2), ("pp", "dp", "tp"))
    stage = rank // 4
    model = nn.Module()
    shape = (5 + stage, 3)
    weight = distribute_tensor(torch.zeros(shape), mesh["tp"], [Shard(0)], src_data_rank=None)
    model.register_buffer(f"of_{stage}", weight)
    whole = torch.arange(3.0 * shape[0]).view(shape)
    src = 4 * stage + 1
    load_full_state_dict(model, {f"of_{stage}": whole} if rank == src else None, src=src)
    assert equal(weight.full_tensor(), whole)
    found = full_state_dict(model, to=src)
    assert (list(found) == [f"of_{stage}"]) == (rank == src)


@pytest.mark.parametrize("unrelated", [False, True])
@on_ranks(4)
def test_flattened_submeshes_hold_replicas(rank: int, world: int, unrelated: bool) -> None:
    """Loads into torchtitan's meshes: dp_shard and cp flattened, beside tp."""
    if unrelated:
        own = DeviceMesh(device_type(), [0, 1]), DeviceMesh(device_type(), [2, 3])
        flat = own[rank // 2]
    else:
        mesh = named_mesh((2, 1, 2), ("dp_shard", "cp", "tp"))
        flat = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    model = nn.Module()
    weight = distribute_tensor(torch.zeros(5, 3), flat, [Shard(0)], src_data_rank=None)
    model.register_buffer("weight", weight)
    model.register_buffer("plain", torch.zeros(2).to(device_type()))
    whole = torch.arange(15.0).view(5, 3)
    load_full_state_dict(model, {"weight": whole, "plain": torch.ones(2)} if rank == 1 else None, src=1)
    assert equal(weight.full_tensor(), whole)
    assert model.get_buffer("plain").sum() == 2
    found = full_state_dict(model, to=1)
    assert rank != 1 or equal(found["weight"], whole)


def loads_from_outside(rank: int, world: int) -> tuple[str, str]:
    """No rank of the weight's mesh is ``src``."""
    mesh = DeviceMesh(device_type(), [0, 1])
    model = nn.Module()
    local = torch.zeros(2 if rank < 2 else 0, 3).to(device_type())
    spec: Any = {"run_check": False, "shape": (4, 3), "stride": (3, 1)}
    model.register_buffer("weight", DTensor.from_local(local, mesh, [Shard(0)], **spec))
    found = error_of(lambda: load_full_state_dict(model, {"weight": torch.ones(4, 3)}, src=2))
    is_in_step(world)
    return found


def test_a_source_outside_of_the_mesh_is_refused_on_all_ranks() -> None:
    for kind, message in run_ranks(loads_from_outside, 3):
        assert kind == "ValueError"
        assert "which rank 2 is not part of" in message


def test_a_mesh_outside_of_the_group_is_refused() -> None:
    for kind, message in run_ranks(mesh_outside_of_group, 2):
        assert kind == "ValueError"
        assert "does not take part. Pass a group with all ranks of all meshes as group" in message


@pytest.mark.cuda
@pytest.mark.usefixtures("on_devices")
@on_ranks(2)
def test_offloaded_parameters_go_through_the_device(rank: int, world: int) -> None:
    """Shards on the CPU, of a mesh of devices."""
    mesh = init_device_mesh(device_type(), (world,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    for layer in model:
        fully_shard(layer, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert model[0].weight.to_local().is_cpu
    wholes = wholes_of(model)
    load_full_state_dict(model, wholes if rank == 0 else None, bucket_bytes=40)
    wholes = run_from_first(wholes)
    for name, whole in full_state_dict(model, to=None, bucket_bytes=40).items():
        assert whole.is_cpu
        assert equal(whole, wholes[name]), name
