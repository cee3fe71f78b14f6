"""The tables of decisions, plans and specs: their limits, and what is forgotten with a mesh."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from versions import needs_decisions_in_cpp

import funcol


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    limits = funcol.table_limits()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with funcol.installed():
            yield
    finally:
        funcol.table_limits(limits)
        dist.destroy_process_group()


def tensor_of(mesh: DeviceMesh, size: int) -> DTensor:
    return DTensor.from_local(torch.ones(1), mesh, [Replicate()], shape=torch.Size([size]), stride=(1,))


def double_sizes(mesh: DeviceMesh, sizes: range) -> None:
    for size in sizes:
        tensor_of(mesh, size) * 2


def test_all_tables_take_248_mib_at_most_by_default() -> None:
    assert sum(funcol.table_limits().values()) == 248 << 20


def test_tables_of_more_shapes_than_they_hold_stay_within_their_limits() -> None:
    mesh = DeviceMesh("cpu", range(4))
    limits = funcol.table_limits({"calls": 50_000, "specs": 50_000})
    for _ in range(3):
        double_sizes(mesh, range(1, 1000))
    taken = funcol._C.table_bytes()
    assert 40_000 < taken["calls"] <= limits["calls"] == 50_000
    assert 40_000 < taken["specs"] <= limits["specs"] == 50_000


def test_a_table_without_bytes_remembers_nothing_and_results_are_the_same() -> None:
    mesh = DeviceMesh("cpu", range(4))
    funcol.table_limits(dict.fromkeys(funcol.table_limits(), 0))
    x = DTensor.from_local(torch.arange(4.0), mesh, [Shard(0)])
    assert (x * 2).to_local().tolist() == [0, 2, 4, 6]
    moved = x.redistribute(mesh, [Shard(0)]) + x
    assert moved.placements == (Shard(0),)
    assert not any(funcol._C.table_bytes().values())


@needs_decisions_in_cpp
def test_calls_that_a_full_table_has_no_room_for_leave_nothing_behind() -> None:
    mesh = DeviceMesh("cpu", range(4))
    funcol.table_limits({"calls": 20_000, "specs": 20_000})
    double_sizes(mesh, range(1, 1000))
    funcol.installation.forget_operator_counts()
    gc.collect()
    before = len(gc.get_objects())
    double_sizes(mesh, range(1000, 2000))
    gc.collect()
    assert len(gc.get_objects()) < before + 500
    counts = funcol.installation.operator_counts()["aten.mul.Tensor"]
    assert counts.keys() <= {"served", "full"}
    assert counts["full"] > 800


@needs_decisions_in_cpp
def test_calls_that_pytorch_carries_out_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(funcol.installation.propagation, "MOST_DECISIONS_IN_PYTORCH", 50)
    clear = torch._C._clear_DTensor_sharding_propagator_cache
    callers = []

    def clear_between_calls() -> None:
        callers.append([frame.name for frame in traceback.extract_stack()])
        clear()

    monkeypatch.setattr(torch._C, "_clear_DTensor_sharding_propagator_cache", clear_between_calls)
    mesh = DeviceMesh("cpu", range(4))
    sizes = []
    funcol.installation.forget_operator_counts()
    for size in range(1, 500):
        rows = distribute_tensor(torch.ones(6, size), mesh, [Shard(0)], src_data_rank=None)
        assert rows.view(-1).shape == (6 * size,)
        sizes.append(sum(torch._C._get_DTensor_sharding_propagator_cache_stats()))
    assert funcol.installation.operator_counts()["aten.view.default"]["decision"] > 400
    assert 20 < max(sizes) <= 60
    # A call that asks for a decision writes it into the table afterwards.
    assert len(callers) > 5
    assert not any("_propagate" in caller for caller in callers)


def test_a_mesh_that_goes_takes_its_entries_along() -> None:
    kept, gone = DeviceMesh("cpu", range(4)), DeviceMesh("cpu", range(3, -1, -1))
    double_sizes(kept, range(1, 11))
    gc.collect()
    before = funcol._C.table_sizes()
    double_sizes(gone, range(1, 21))
    assert funcol._C.table_sizes()["calls"] >= before["calls"] + 20
    del gone
    gc.collect()
    after = funcol._C.table_sizes()
    # Meshes of other tests may go meanwhile, for PyTorch's caches keep some.
    assert after.pop("known_meshes") <= before.pop("known_meshes")
    assert after == before


def test_an_unknown_table_is_named_and_nothing_is_set() -> None:
    before = funcol.table_limits()
    with pytest.raises(ValueError, match=r"no table 'call'. Tables: calls, "):
        funcol.table_limits({"specs": 7, "call": 0})
    with pytest.raises(ValueError, match=r"'calls' is -1 bytes. Expected 0 or more"):
        funcol.table_limits({"specs": 7, "calls": -1})
    assert funcol.table_limits() == before
