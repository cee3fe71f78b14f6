"""The soak: what counts as growth, and, for minutes, that nothing grows."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from flatness import trend_of
from gloo_ranks import run_on_ranks
from soak_ranks import bytes_that_groups_leave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import funcol

ROOT = Path(__file__).resolve().parents[3]


def noisy(slope: float, seed: int) -> list[float]:
    """60 samples around 1000 with a deviation of 5."""
    chosen = random.Random(seed)
    return [1000 + slope * i + chosen.gauss(0, 5) for i in range(60)]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_flat(seed: int) -> None:
    assert trend_of(noisy(0, seed)).is_flat(floor=0)


@pytest.mark.parametrize("seed", range(20))
def test_a_slope_beyond_the_noise_is_growth(seed: int) -> None:
    trend = trend_of(noisy(0.5, seed))
    assert not trend.is_flat(floor=10)
    assert 20 < trend.growth < 40
    assert trend.is_flat(floor=40)


def test_a_count_that_rises_by_more_than_two_is_growth() -> None:
    assert trend_of([7.0] * 30 + [8.0] * 30).is_flat(floor=2)
    assert not trend_of([7.0 + i // 10 for i in range(60)]).is_flat(floor=2)


def test_outliers_are_no_growth() -> None:
    assert trend_of([7.0] * 50 + [70.0] * 10).is_flat(floor=0)


def test_what_shrinks_is_flat() -> None:
    assert trend_of([100.0 - i for i in range(60)]).is_flat(floor=0)


def test_two_samples_have_no_trend() -> None:
    with pytest.raises(ValueError, match="3 samples or more, there are 2"):
        trend_of([1.0, 2.0])


def held() -> list[int]:
    sizes = funcol._C.table_sizes()
    return [sizes[name] for name in ("transfers", "signatures", "calls", "specs")]


def test_tables_say_what_they_hold_and_are_empty_once_all_groups_are_gone() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with funcol.installed():
        dtensor = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
        funcol.redistribute(dtensor + dtensor, placements=[Shard(1)]).to_local().sum()
        assert min(held()) > 0, held()
        dist.destroy_process_group()
        assert not any(held()), held()


def test_tables_forget_a_mesh_whose_group_is_gone() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        other = dist.new_group([0, 3])
        with funcol.installed():
            mesh = init_device_mesh("cpu", (2, 2))
            dtensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(0)])
            funcol.redistribute(dtensor + dtensor, placements=[Shard(0), Shard(1)]).to_local().sum()
            full = held()
            assert min(full) > 0, full
            dist.destroy_process_group(other)  # which no mesh has
            assert held() == full
            dist.destroy_process_group(mesh.get_group(1))
            assert not any(held()), held()
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_groups_leave_no_more_behind_than_with_pytorch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "10")  # else its ring of entries fills up for long
    alone, beside = (
        run_on_ranks(bytes_that_groups_leave, 2, with_funcol, 400, limit_s=300)
        for with_funcol in (False, True)
    )
    assert beside < alone + 64, (alone, beside)


def soak(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "soak"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)


@pytest.mark.long
def test_nothing_grows_in_five_minutes() -> None:
    done = soak("--minutes", "5")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_leak_is_found() -> None:
    done = soak("--minutes", "1", "--leak")
    assert done.returncode == 1, done.stdout + done.stderr
    growing = done.stderr.partition("these grow:")[2]
    assert "resident bytes" in growing
    assert "descriptors" in growing
