"""Weights of a trainer in the layouts of an engine: on other ranks, in other meshes, dtypes and names."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from against_full_tensor import Ends
from ranks import device_type, on_ranks, run_ranks
from sharded import Layout, layouts, mesh_of, ordered, placed, whole_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from funcol import WeightSync
from funcol.redistribution import plan_mesh_change

ON_DEVICES = True

ALL_4 = (0, 1, 2, 3)
SAME = Ends((2, 2), ALL_4, (4,), ALL_4)
SUBSET = Ends((2, 2), ALL_4, (2,), (1, 3))
SUPERSET = Ends((2,), (0, 1), (2, 2), ALL_4)
DISJOINT = Ends((2,), (0, 1), (2,), (2, 3))
IN_PAIRS = Ends((2,), (0, 1), (2,), (1, 2))
TO_FIVE = Ends((2,), (1, 0), (2, 2), (4, 3, 1, 2))

SHAPES = [(8, 12), (5, 3), (1, 7), (0, 4)]
ONE_AXIS = layouts("R", "S0", "S1", "_S0/2", "_S1/3")
TWO_AXES = [
    *layouts("R R", "S0 R", "R S1", "S0 S0", "S0 S1", "S1 S0", "_S0/2 S0", "S0 _S0/3", "_S1/2 R"),
    ordered("S0 S0", (0, (1, 0))),
    ordered("S1 S1", (1, (1, 0))),
]


def empty_like(tensor: DTensor) -> DTensor:
    local = torch.full_like(tensor._local_tensor, 77)
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[call-arg]


def sides(
    ends: Ends, items: list[tuple[Any, ...]], rank: int
) -> tuple[dict[str, DTensor] | None, dict[str, DTensor] | None, dict[str, DTensor]]:
    """Source, destination and what is expected there; None on ranks that are not part of a side."""
    src_mesh, dst_mesh = ends.meshes()
    source, expected = {}, {}
    for index, (shape, dtype, src, dst) in enumerate(items):
        whole = whole_of(shape, dtype)
        source[str(index)] = placed(whole, src, src_mesh)
        expected[str(index)] = placed(whole, dst, dst_mesh)
    destination = {name: empty_like(one) for name, one in expected.items()}
    return (
        source if rank in ends.src_ranks else None,
        destination if rank in ends.dst_ranks else None,
        expected if rank in ends.dst_ranks else {},
    )


def moves(rank: int, world: int, ends: Ends, options: dict[str, Any]) -> tuple[int, int]:
    chosen = [ONE_AXIS if len(shape) == 1 else TWO_AXES for shape in (ends.src, ends.dst)]
    items = [(shape, torch.float32, *pair) for shape in SHAPES for pair in itertools.product(*chosen)]
    items += [((), torch.int64, *(Layout(("R",) * len(shape)) for shape in (ends.src, ends.dst)))]
    source, destination, expected = sides(ends, items, rank)
    sync = WeightSync(source, destination, **options)
    sent = sync()
    for name, one in expected.items():
        assert destination is not None
        assert torch.equal(destination[name]._local_tensor, one._local_tensor), items[int(name)]
    least = 0
    for shape, dtype, src, dst in items:
        mesh, to_mesh = ({f"a{i}": n for i, n in enumerate(sizes)} for sizes in (ends.src, ends.dst))
        change = plan_mesh_change(
            src.placements(),
            dst.placements(),
            mesh,
            to_mesh,
            shape,
            dtype,
            ranks=ends.src_ranks,
            to_ranks=ends.dst_ranks,
            src_shard_order=src.order,
            dst_shard_order=dst.order,
        )
        least += change.as_transfer().total
    return sent, least


@pytest.mark.parametrize("options", [{}, {"max_bytes": 300}, {"changed_only": True}], ids=str)
@pytest.mark.parametrize("ends", [SAME, SUBSET, SUPERSET, DISJOINT, IN_PAIRS, TO_FIVE], ids=str)
def test_every_pair_of_layouts_arrives(ends: Ends, options: dict[str, Any]) -> None:
    results = run_ranks(moves, 5 if ends is TO_FIVE else 4, ends, options)
    sent, least = sum(sent for sent, _ in results), results[0][1]
    assert sent == least if "changed_only" not in options else sent >= least


class Mlp(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9, dtype=dtype)
        self.down = nn.Linear(9, 6, bias=False, dtype=dtype)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def whole_mlp() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: value.to(device_type()) for name, value in Mlp().state_dict().items()}


def trains_and_serves(rank: int, world: int, rows: list[list[int]], in_group: list[int] | None) -> None:
    """Ranks 0 and 1 train; each of ``rows`` has a replica of the engine, cut along it."""
    mesh = DeviceMesh(device_type(), [0, 1])
    engines = DeviceMesh(device_type(), rows, mesh_dim_names=("replicas", "tp"))
    group: Any = None if in_group is None else dist.new_group(in_group)
    if in_group is not None and rank not in in_group:
        return
    trainer = engine = None
    if rank < 2:
        torch.manual_seed(1)
        trainer = fully_shard(Mlp().to(device_type()), mesh=mesh)
    if engines.get_coordinate() is not None:
        engine = Mlp(torch.bfloat16).to(device_type())
        parallelize_module(engine, engines["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sync = WeightSync(trainer, engine, group=group)
    for step in (1, 2, 3):
        if trainer is not None:
            with torch.no_grad():
                for weight in trainer.parameters():
                    weight.mul_(2)
                trainer.steps.add_(1)
        sync()
        for name, found in {} if engine is None else engine.state_dict().items():
            expected = whole_mlp()[name]
            expected = expected + step if name == "steps" else (expected * 2**step).bfloat16()
            assert torch.equal(found.full_tensor() if isinstance(found, DTensor) else found, expected), name


@pytest.mark.parametrize("rows", [[[1, 2], [3, 4]], [[3, 4]]], ids=["two replicas", "one engine"])
def test_a_trainer_keeps_engines_in_step(rows: list[list[int]]) -> None:
    run_ranks(trains_and_serves, 5, rows, None)


def test_ranks_outside_of_the_group_need_not_call() -> None:
    run_ranks(trains_and_serves, 5, [[2], [3]], [0, 1, 2, 3])


@pytest.mark.parametrize("by", ["mapping", "function"])
@on_ranks(2)
def test_views_of_a_fused_tensor_get_the_parts(rank: int, world: int, by: str) -> None:
    """The engine has q and k in one tensor, and names of its own."""
    mesh = mesh_of((world,))
    wholes = {
        name: whole_of((4, 3), torch.float32) + index for index, name in enumerate(("attn.q", "attn.k"))
    }
    source = {name: distribute_tensor(whole, mesh, [Shard(1)]) for name, whole in wholes.items()}
    source["unused"] = distribute_tensor(torch.ones(3), mesh, [Shard(0)])
    qk = torch.zeros(8 // world, 3, dtype=torch.float64)
    theirs = {"0.q": "attn.q", "0.k": "attn.k", "extra": None}
    destination: dict[str, Tensor] = {"extra": torch.ones(1)}
    for part, view in zip(("0.q", "0.k"), qk.split(4 // world), strict=True):
        destination[part] = DTensor.from_local(view, mesh, [Shard(0)], run_check=False)
    names: Any = theirs if by == "mapping" else theirs.__getitem__
    WeightSync(source, destination, names=names)()
    parts = [whole.chunk(world)[rank] for whole in wholes.values()]
    assert torch.equal(qk, torch.cat(parts).double())


@on_ranks(4)
def test_senders_cast_to_the_smaller_dtype_or_to_the_one_asked_for(rank: int, world: int) -> tuple[int, ...]:
    src, dst = DISJOINT.meshes()
    whole = whole_of((8, 4), torch.float32) / 3
    counts = []
    for from_dtype, to_dtype, options, itemsize in (
        (torch.float32, torch.bfloat16, {}, 2),
        (torch.bfloat16, torch.float32, {}, 2),
        (torch.float32, torch.float32, {"dtype": torch.bfloat16}, 2),
        (torch.float32, torch.float64, {"dtype": {"w": torch.float64}}, 8),
        (torch.int64, torch.int64, {"dtype": torch.bfloat16}, 8),
    ):
        given = whole.to(from_dtype)
        held = placed(given, Layout(("S0",)), src)
        wanted = placed(torch.zeros_like(whole, dtype=to_dtype), Layout(("S1",)), dst)
        sent = WeightSync(
            {"w": held} if rank < 2 else None, {"w": wanted} if rank >= 2 else None, **options
        )()  # type: ignore[arg-type]
        assert sent == (16 * itemsize if rank < 2 else 0)
        if rank >= 2:
            travels = options.get("dtype", to_dtype)
            travels = travels["w"] if isinstance(travels, dict) else travels
            expected = given.to(travels if given.is_floating_point() else given.dtype).to(to_dtype)
            assert torch.equal(wanted.to_local(), expected.chunk(2, 1)[rank - 2])
        counts.append(sent)
    return tuple(counts)


def sends_changes(rank: int, world: int) -> list[int]:
    src, dst = DISJOINT.meshes()
    whole = torch.arange(64.0 * 64).view(64, 64)
    held = {name: placed(whole, Layout(("S0",)), src) for name in "ab"}
    wanted = {name: placed(torch.zeros_like(whole), Layout(("S1",)), dst) for name in "ab"}
    sync = WeightSync(held if rank < 2 else None, wanted if rank >= 2 else None, changed_only=True)
    counts = [sync(), sync()]
    local = held["b"]._local_tensor
    changes: list[tuple[int, Tensor]] = [
        (7, torch.tensor(-1.0)),
        (11, torch.tensor(-0.0)),
        (11, torch.tensor(0.0)),
    ]
    for row, value in changes:
        if rank == 0:
            local[row % 32, 40] = value
        whole = whole.clone()
        whole[row % 32, 40] = value
        if rank >= 2:
            wanted["b"]._local_tensor[row, :] += 0  # its own memory, untouched by blocks that did not change
        counts.append(sync())
        if rank >= 2:
            found = wanted["b"]._local_tensor
            expected = whole.chunk(2, 1)[rank - 2]
            assert torch.equal(found, expected)
            assert torch.equal(torch.signbit(found), torch.signbit(expected))
    return counts


def test_only_blocks_that_changed_are_sent() -> None:
    first, second, *receivers = run_ranks(sends_changes, 4)
    everything = 2 * 64 * 64 * 4 // 2
    assert first == [everything, 0, 1024, 1024, 1024]
    assert second == [everything, 0, 0, 0, 0]
    assert all(not any(counts) for counts in receivers)


@on_ranks(2)
def test_receivers_keep_what_did_not_change_bitwise(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    held = distribute_tensor(torch.arange(2048.0), mesh, [Shard(0)])
    wanted = DTensor.from_local(torch.zeros(2048, dtype=torch.float64), mesh, [Replicate()], run_check=False)
    sync = WeightSync({"w": held}, {"w": wanted}, changed_only=True)
    sync()
    local = wanted._local_tensor
    other = 1024 * (1 - rank)
    local += 0.1  # in values that are not those of the dtype that travels
    kept = local.clone()
    if rank == 0:
        held._local_tensor[300] = -5
    sync()
    if rank == 1:
        kept[256:512] = torch.arange(256.0, 512.0).double()
        kept[300] = -5
    kept[1024 * rank : 1024 * rank + 1024] = held._local_tensor.double()  # its own part is copied
    assert torch.equal(local[other : other + 1024], kept[other : other + 1024])
    assert torch.equal(local, kept)


@on_ranks(2)
def test_memory_that_was_replaced_is_found(rank: int, world: int) -> None:
    """A tensor of the trainer gets other memory between two calls, as FSDP2 does when it moves a model."""
    mesh = mesh_of((world,))
    held = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    wanted = torch.zeros(4, 2)
    sync = WeightSync({"w": held}, {"w": wanted})
    sync()
    assert wanted.sum() == 8
    held._local_tensor = torch.full_like(held._local_tensor, 3)
    sync()
    assert wanted.sum() == 24


def alone(rank: int, world: int) -> None:
    held, wanted = torch.arange(4), torch.zeros(4)
    for options in ({}, {"changed_only": True}):
        assert WeightSync({"w": held}, {"w": wanted.zero_()}, **options)() == 0
        assert torch.equal(wanted, held.float())


@pytest.mark.parametrize("world", [1, 3])
def test_a_rank_with_both_sides_sends_nothing(world: int) -> None:
    run_ranks(alone, world)


def test_it_works_without_process_groups() -> None:
    alone(0, 1)


@on_ranks(4)
def test_buffers_keep_within_max_bytes(rank: int, world: int) -> None:
    src, dst = DISJOINT.meshes()
    names = [str(index) for index in range(10)]
    held = {name: placed(torch.ones(16, 16), Layout(("S0",)), src) for name in names}
    wanted = {name: placed(torch.zeros(16, 16), Layout(("S1",)), dst) for name in names}
    sizes = []
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent:
        WeightSync(held if rank < 2 else None, wanted if rank >= 2 else None, max_bytes=3 * 1024)()
        sizes = [call.args[0].nbytes + call.args[1].nbytes for call in sent.call_args_list]
    assert sizes == [1536] * 3 + [512]  # three tensors of 512 bytes a batch, sent or received
    if rank >= 2:
        assert all(bool((one._local_tensor == 1).all()) for one in wanted.values())


def error_of(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def in_step(world: int) -> None:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world


WRONG = {
    "max_bytes": "max_bytes is 5 on rank 1, 100 on ranks 0, 2",
    "changed_only": "changed_only is True on rank 1, False on ranks 0, 2",
    "name": "tensor 0 is 'x' on rank 1, 'w' on ranks 0, 2",
    "dtype": "the dtype of 'w' is torch.float64 on rank 1, torch.float32 on ranks 0, 2",
    "asked for": "the dtype that is asked for of 'w' is torch.bfloat16 on rank 1, none on ranks 0, 2",
    "placement": "the placements of 'w' is (Replicate(),) on rank 1, (Shard(dim=0),) on ranks 0, 2",
    "not there": "tensor 0 is missing on rank 1, 'w' on ranks 0, 2",
    "mesh": "the mesh of 'w' has the shape (3, 1) on rank 1, (1, 3) on ranks 0, 2",
    "missing": "'v' of the destination is missing in the source",
    "names": "names has 'z' for 'w' on rank 1, and 'w' on others",
    "shape": "'w' has shape (3, 1), in the source (3, 3)",
    "plain": "'w' is torch.float32 (3, 2) on rank 1, and torch.float32 (3, 3) on others",
    "partial": "'w' has the placements (Partial(sum),). Reduce it first",
    "outside": "'w' is on a mesh with rank 2, which does not take part",
}


def wrong(rank: int, world: int, which: str) -> tuple[str, str]:
    mesh = mesh_of((world,))

    def rows(placement: Any = Shard(0), dtype: torch.dtype = torch.float32) -> DTensor:  # noqa: B008
        local = torch.ones(1 if placement == Shard(0) else 3, 3, dtype=dtype)
        return DTensor.from_local(local, mesh, [placement], run_check=False)

    source: dict[str, Tensor] = {"w": rows()}
    destination: dict[str, Tensor] = {"w": rows()}
    options: dict[str, Any] = {"max_bytes": 100}
    meshes = mesh_of((1, 3)), mesh_of((3, 1))
    group = dist.new_group([0, 1])
    differs = rank == 1
    match which:
        case "max_bytes":
            options["max_bytes"] = 5 if differs else 100
        case "changed_only":
            options["changed_only"] = differs
        case "name" if differs:
            source = {"x": rows()}
        case "dtype" if differs:
            destination = {"w": rows(dtype=torch.float64)}
        case "asked for" if differs:
            options["dtype"] = torch.bfloat16
        case "placement" if differs:
            source = {"w": rows(Replicate())}
        case "not there" if differs:
            destination = {}
        case "mesh":
            placements = [Replicate(), Replicate()]
            local = torch.ones(3, 3)
            source = {"w": DTensor.from_local(local, meshes[differs], placements, run_check=False)}
        case "missing":
            destination["v"] = rows()
        case "names" if differs:
            options["names"] = {"w": "z"}
        case "shape":
            destination = {"w": torch.ones(3, 1)}
        case "plain":
            destination = {"w": torch.ones(3, 2 if differs else 3)}
        case "partial":
            source = {"w": rows(Partial())}
        case "outside":
            options["group"] = group
            if rank == 2:
                return error_of(lambda: None)
    found = error_of(lambda: WeightSync(source, destination, **options))
    if which != "outside":
        in_step(world)
    return found


ON_GLOO = pytest.param("outside", marks=pytest.mark.cpu_only)


@pytest.mark.parametrize("which", [*(which for which in WRONG if which != "outside"), ON_GLOO])
def test_differences_are_refused_on_all_ranks_before_the_first_byte(which: str) -> None:
    for kind, message in run_ranks(wrong, 3, which)[: 2 if which == "outside" else 3]:
        assert kind == "ValueError", message
        assert WRONG[which] in message, message


def fails(rank: int, world: int, when: str) -> tuple[str, str]:
    src, dst = DISJOINT.meshes()
    held = {name: placed(torch.ones(4, 4), Layout(("S0",)), src) for name in "abc"}
    wanted = {name: placed(torch.zeros(4, 4), Layout(("S1",)), dst) for name in "abc"}
    source: Any = held if rank < 2 else None
    destination: Any = wanted if rank >= 2 else None
    if when == "argument":
        found = error_of(lambda: WeightSync([1] if rank == 1 else source, destination))
        in_step(world)
        return found
    if when == "local":
        if rank == 1:
            held["b"]._local_tensor = torch.ones(7)
        found = error_of(lambda: WeightSync(source, destination))
        in_step(world)
        return found
    sync = WeightSync(source, destination, max_bytes=50, changed_only=when == "sends all")
    sync()
    broken, whole = (held if rank == 1 else wanted)["b"], torch.ones(4, 4)
    kept = broken._local_tensor
    if rank == (3 if when == "receiver" else 1):
        broken._local_tensor = torch.ones(1)
    found = error_of(sync)
    in_step(world)
    broken._local_tensor = kept
    if rank >= 2:
        wanted["a"]._local_tensor.zero_()
    sent = sync()
    assert sent == (0 if rank >= 2 else 3 * 32 if when != "sends all" else 3 * 2 * 1024)
    if rank >= 2:
        assert all(torch.equal(one._local_tensor, whole[:, :2]) for one in wanted.values())
    return found


@pytest.mark.parametrize("when", ["argument", "local", "sender", "receiver", "sends all"])
def test_the_others_are_told_which_rank_failed_and_the_next_call_works(when: str) -> None:
    results = run_ranks(fails, 4, when)
    failed = 3 if when == "receiver" else 1
    assert results.pop(failed)[0] not in ("", "RuntimeError") or when in ("sender", "receiver", "sends all")
    for kind, message in results:
        assert kind == "RuntimeError", message
        assert f"funcol::WeightSync: rank {failed} left" in message, message
