"""``full_tensors``: the whole of each tensor, in order, by a few collectives."""

from __future__ import annotations

import io
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from against_full_tensor import export_errors, items_of, named_of
from ranks import device_type, on_ranks, run_ranks
from sharded import Layout, layouts, mesh_of, ordered, placed, whole_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops._math_ops import _NormPartial

import funcol
from funcol import full_tensors

ON_DEVICES = True

SHAPES = [(8, 12), (5, 3), (1, 7), (0, 4)]

ONE_AXIS = layouts("R", "S0", "S1", "_S0/2", "_S1/3", "Psum", "Pavg", "Pmax")

TWO_AXES = [
    *layouts("R R", "S0 R", "R S0", "S0 S0", "S0 S1", "S1 S0", "_S0/2 S0", "Psum R", "Psum Psum", "Psum S1"),
    *(ordered("S0 S0", (0, (1, 0))), ordered("S1 S1", (1, (1, 0)))),
]

BUCKETS = [1, 300, 1 << 20]  # bytes: a tensor each, several, all


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("to", [None, "last"], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_layout_of_one_axis_becomes_whole(world: int, to: str | None, bucket_bytes: int) -> None:
    options = {"to": world - 1 if to else None, "bucket_bytes": bucket_bytes}
    items = items_of(SHAPES, ONE_AXIS)
    assert [*itertools.chain(*run_ranks(export_errors, world, (world,), items, options))] == []


@pytest.mark.parametrize("bucket_bytes", BUCKETS)
@pytest.mark.parametrize("to", [None, 0, 3], ids=str)
def test_every_layout_of_two_axes_becomes_whole(to: int | None, bucket_bytes: int) -> None:
    items = items_of(SHAPES, TWO_AXES)
    options = {"to": to, "bucket_bytes": bucket_bytes}
    assert [*itertools.chain(*run_ranks(export_errors, 4, (2, 2), items, options))] == []


@on_ranks(4)
def test_meshes_in_another_order_of_ranks_become_whole(rank: int, world: int) -> None:
    """A mesh of two axes that is not the world has no group of all its ranks."""
    mesh = DeviceMesh(device_type(), [[3, 1], [0, 2]], mesh_dim_names=("a", "b"))
    chosen = layouts("S0 S1", "S0 R", "R S1", "S0 S0", "R R")
    whole = whole_of((5, 6), torch.float32)
    named = {str(layout): placed(whole, layout, mesh) for layout in chosen}
    for to in (None, 1):
        for name, result in full_tensors(named, to=to):
            assert result is None if to not in (None, rank) else torch.equal(result, whole), name  # type: ignore[arg-type]


@on_ranks(4)
def test_meshes_dtypes_parameters_and_plain_tensors_mix(rank: int, world: int) -> None:
    mesh, other = mesh_of((2, 2)), mesh_of((4,))
    pair = mesh["b"]  # two meshes of two ranks
    whole = whole_of((6, 5), torch.float32)
    columns = distribute_tensor(whole, other, [Shard(1)])
    named: list[tuple[str, Tensor]] = [
        ("rows", nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Shard(0)]))),
        ("plain", nn.Parameter(whole.clone())),
        ("columns", columns),
        ("transposed", columns.t()),
        ("pair", distribute_tensor(whole, pair, [Shard(0)])),
        ("scalar", distribute_tensor(whole[0, 0], mesh, [Replicate(), Replicate()])),
        ("empty", distribute_tensor(whole[:0], mesh, [Shard(0), Shard(1)])),
        ("half", distribute_tensor(whole.to(torch.bfloat16), other, [Shard(0)])),
    ]
    expected = [whole, whole, whole, whole.t(), whole, whole[0, 0], whole[:0], whole.to(torch.bfloat16)]
    for bucket_bytes in (1, 100, 1 << 20):
        results = [*full_tensors(iter(named), bucket_bytes=bucket_bytes)]
        assert [name for name, _ in results] == [name for name, _ in named]
        for (name, result), value in zip(results, expected, strict=True):
            assert result is not None
            assert torch.equal(result, value), name
            assert not result.requires_grad
            assert not isinstance(result, DTensor)
            assert not funcol.is_pending(result)


@pytest.mark.parametrize("to", [None, 0], ids=str)
@on_ranks(2)
def test_results_have_the_dtype_and_device_that_are_asked_for(rank: int, world: int, to: int | None) -> None:
    mesh = mesh_of((world,))
    values = {
        "narrowed": torch.linspace(0, 1, 12).view(6, 2).double(),
        "widened": torch.linspace(0, 1, 12).view(6, 2).bfloat16(),
        "integers": torch.arange(12).view(6, 2),
        "plain": torch.linspace(0, 1, 12),
    }
    named = {
        name: value if name == "plain" else distribute_tensor(value, mesh, [Shard(0)])
        for name, value in values.items()
    }
    for name, whole in full_tensors(named, to=to, dtype=torch.float32, device="cpu"):
        if to in (None, rank):
            assert whole is not None
            assert whole.device.type == "cpu"
            wanted = values[name] if name == "integers" else values[name].float()
            assert whole.dtype == wanted.dtype
            assert torch.equal(whole, wanted.cpu())


class Tied(nn.Module):
    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.embedding = nn.Parameter(distribute_tensor(whole_of((9, 4), torch.float32), mesh, [Shard(0)]))
        self.between = nn.Parameter(distribute_tensor(whole_of((3, 4), torch.float32), mesh, [Shard(0)]))
        self.head = self.embedding


@on_ranks(2)
def test_tied_parameters_are_sent_once(rank: int, world: int) -> None:
    model = Tied(mesh_of((world,)))
    for bucket_bytes in (1, 1 << 20):
        gathers = count(
            lambda size=bucket_bytes: {**dict(full_tensors(model, bucket_bytes=size))}, "allgather"
        )
        assert gathers == (1 if bucket_bytes > 1 else 2)
        wholes = dict(full_tensors(model, bucket_bytes=bucket_bytes))
        assert wholes["head"] is wholes["embedding"]
        assert torch.equal(wholes["head"], whole_of((9, 4), torch.float32))  # type: ignore[arg-type]


def count(call: Callable[[], object], name: str) -> int:
    """Returns how often a backend was called for a collective, as PyTorch's profiler sees it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.name.startswith("c10d::") and name in event.name for event in profile.events())


@on_ranks(2)
def test_a_bucket_is_one_collective(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    named = {
        str(index): distribute_tensor(torch.ones(index + 1, 8), mesh, [Shard(index % 2)])
        for index in range(100)
    }
    assert count(lambda: [*full_tensors(named)], "allgather") == 1
    assert count(lambda: [*full_tensors(named, to=0)], "alltoall") == 1
    assert count(lambda: [*full_tensors(named, to=0)], "allgather") == 0


@on_ranks(2)
def test_the_next_bucket_is_read_while_one_is_used(rank: int, world: int) -> None:
    """The next bucket is on its way while this one is used."""
    mesh = mesh_of((world,))
    read: list[int] = []

    def named() -> Iterator[tuple[str, Tensor]]:
        for index in range(4):
            read.append(index)
            yield str(index), distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])

    seen = [len(read) for _ in full_tensors(named(), bucket_bytes=1)]
    assert seen == [2, 3, 4, 4]


def leaves_early(rank: int, world: int, leaver: int, after: int, raises: bool) -> str:
    mesh = mesh_of((2, 2))
    named = {str(i): distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]) for i in range(8)}
    start = time.monotonic()
    try:
        with full_tensors(named, bucket_bytes=1) as stream:
            for index, _ in enumerate(stream):
                if rank == leaver and index == after:
                    if raises:
                        raise OSError("the disk is full")
                    break
    except (RuntimeError, OSError) as error:
        assert time.monotonic() - start < 20
        return str(error)
    return ""


@pytest.mark.parametrize(("after", "raises"), [(0, False), (2, True), (5, True)])
def test_other_ranks_learn_of_a_rank_that_leaves_early(after: int, raises: bool) -> None:
    results = run_ranks(leaves_early, 4, 1, after, raises)
    assert results.pop(1) == ("the disk is full" if raises else "")
    reason = "OSError: the disk is full" if raises else "it left the loop"
    assert all(f"rank 1 left after {after + 1} tensors: {reason}" in result for result in results)


def source_fails(rank: int, world: int) -> str:
    mesh = mesh_of((world,))

    def named() -> Iterator[tuple[str, Tensor]]:
        for index in range(6):
            if rank == 1 and index == 3:
                raise OSError("no such file")
            yield str(index), DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])

    with pytest.raises((OSError, RuntimeError)) as raised:
        [*full_tensors(named(), bucket_bytes=1)]
    return str(raised.value)


def test_other_ranks_learn_of_a_source_that_fails() -> None:
    first, second = run_ranks(source_fails, 2)
    assert second == "no such file"
    assert "rank 1 left after 2 tensors: OSError: no such file" in first


@on_ranks(3)
def test_all_ranks_may_leave_alike(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    named = {str(i): distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]) for i in range(8)}
    for index, _ in enumerate(full_tensors(named, bucket_bytes=1)):
        if index == 2:
            break
    total = torch.ones(1)
    dist.all_reduce(total)  # the ranks are in step
    assert total.item() == world


@pytest.mark.parametrize("which", ["name", "count", "order"])
@on_ranks(2)
def test_ranks_with_different_tensors_are_told(rank: int, world: int, which: str) -> None:
    mesh = mesh_of((world,))
    names = ["a", "b", "c"]
    if rank == 1:
        names = {"name": ["a", "b", "d"], "count": ["a", "b"], "order": ["b", "a", "c"]}[which]
    named = {name: DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]) for name in names}
    with pytest.raises(ValueError, match="the ranks go through different tensors"):
        [*full_tensors(named, bucket_bytes=1)]


@on_ranks(2)
def test_wrong_arguments_are_refused(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    rows = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"'a' is on .* which rank 7 is not part of"):
        [*full_tensors({"a": rows}, to=7)]
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        [*full_tensors({"a": rows}, bucket_bytes=0)]
    with pytest.raises(ValueError, match="to is -1"):
        [*full_tensors({"a": rows}, to=-1)]
    named: Any = {"a": 3}
    with pytest.raises(TypeError, match="'a' is a int, expected a tensor"):
        [*full_tensors(named)]


@pytest.mark.parametrize("to", [None, 1], ids=str)
@on_ranks(2)
def test_partials_with_rules_of_their_own_become_whole(rank: int, world: int, to: int | None) -> None:
    """Partials with rules of their own do not go with other tensors."""
    mesh = mesh_of((world,))
    parts = torch.tensor([3.0, 4.0]) * (rank + 1)
    named = {
        "rows": distribute_tensor(whole_of((5, 3), torch.float32), mesh, [Shard(0)]),
        "norms": DTensor.from_local(parts, mesh, [_NormPartial(2)], run_check=False),
    }
    wholes = dict(full_tensors(named, to=to))
    if to in (None, rank):
        factor = sum((other + 1) ** 2 for other in range(world)) ** 0.5
        torch.testing.assert_close(wholes["norms"], torch.tensor([3.0, 4.0]) * factor)
        assert torch.equal(wholes["rows"], whole_of((5, 3), torch.float32))  # type: ignore[arg-type]
    else:
        assert wholes == {"rows": None, "norms": None}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_progress_is_shown_on_terminals_alone(monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert len([*full_tensors({"a": torch.ones(3), "b": torch.ones(2)}, progress=True)]) == 2
    shown = terminal.getvalue()
    assert re.search("full_tensors.*2/2.*0.00 GiB", shown) if terminal.isatty() else shown == ""


@on_ranks(3)
def test_ranks_outside_of_a_mesh_get_none(rank: int, world: int) -> None:
    mesh = DeviceMesh(device_type(), [0, 1])
    whole = whole_of((4, 4), torch.float32)
    local = whole.chunk(2)[rank] if rank < 2 else whole[:0]
    rows = DTensor(local, Layout(("S0",)).spec(mesh, whole), requires_grad=False)  # type: ignore[call-arg]
    everywhere = distribute_tensor(whole, mesh_of((world,)), [Shard(0)])
    results = dict(full_tensors({"rows": rows, "everywhere": everywhere}, bucket_bytes=1))
    assert torch.equal(results["everywhere"], whole)  # type: ignore[arg-type]
    assert results["rows"] is None if rank == 2 else torch.equal(results["rows"], whole)  # type: ignore[arg-type]


def needs_no_group() -> Iterator[tuple[str, Tensor]]:
    yield "plain", torch.ones(3)


def test_plain_tensors_need_no_process_group() -> None:
    for to in (None, 0):
        ((name, whole),) = full_tensors(needs_no_group(), to=to)
        assert name == "plain"
        assert whole is not None
        assert whole.tolist() == [1, 1, 1]


def peak(rank: int, world: int, to: int | None) -> None:
    """Of PyTorch's caching allocator: tensors of 1 MiB in buckets of 4."""
    mesh = mesh_of((world,))
    mib = 1 << 20
    named = {str(i): distribute_tensor(torch.ones(1024, 256), mesh, [Shard(i % 2)]) for i in range(16)}
    named["large"] = distribute_tensor(torch.ones(6 * 1024, 256), mesh, [Shard(0)])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _, whole in full_tensors(named, to=to, bucket_bytes=4 * mib):
        del whole
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    # A bucket of its own; the receiver also packs its shard.
    large = 6 * mib if to is None else 9 * mib
    assert used <= 4 * mib + large + mib + 64 * 1024, used / mib


@pytest.mark.parametrize("to", [None, 0], ids=str)
def test_two_buckets_and_one_tensor_are_in_memory(on_devices: None, to: int | None) -> None:
    run_ranks(peak, 2, to)


@on_ranks(4)
def test_installed_or_not_the_wholes_are_the_same(rank: int, world: int) -> None:
    named = named_of(items_of(SHAPES, TWO_AXES), (2, 2))
    expected = dict(full_tensors(named))
    with funcol.installed():
        for name, whole in full_tensors(named):
            assert torch.equal(whole, expected[name])  # type: ignore[arg-type]
