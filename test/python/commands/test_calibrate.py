"""Measured cost models: the fit, and ``python -m funcol calibrate`` on gloo ranks."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh

import funcol
from funcol.__main__ import main
from funcol.commands.calibrate import MOST_GIGABYTES_PER_S, fit, measure
from funcol.cost_models import COLLECTIVES
from funcol.redistribution import AlphaBeta, LinkCost

SIZES = [1024, 16384, 262144]


def on_a_line(latency_us: float, us_per_byte: float) -> list[tuple[float, float]]:
    return [(size, latency_us + size * us_per_byte) for size in SIZES]


@pytest.mark.parametrize(("latency_us", "us_per_byte"), [(5.0, 0.01), (0.0, 1e-4), (250.0, 2e-6)])
def test_times_on_a_line_give_its_latency_and_bandwidth(latency_us: float, us_per_byte: float) -> None:
    found = fit(on_a_line(latency_us, us_per_byte))
    assert found.latency_us == pytest.approx(latency_us, abs=1e-6)
    assert found.gigabytes_per_s == pytest.approx(1 / (1000 * us_per_byte))


def test_a_latency_is_not_negative() -> None:
    assert fit(on_a_line(-5.0, 0.01)).latency_us == 0


def test_times_that_fall_with_the_size_are_all_latency() -> None:
    found = fit([(1000, 12.0), (2000, 10.0)])
    assert 10 <= found.latency_us <= 12
    assert found.gigabytes_per_s == pytest.approx(MOST_GIGABYTES_PER_S)


def test_one_size_is_all_latency() -> None:
    assert fit([(1000, 12.0)]) == LinkCost(pytest.approx(12.0), pytest.approx(MOST_GIGABYTES_PER_S))


def test_small_messages_say_what_the_latency_is() -> None:
    noisy = [(0, 10.0), (1000, 11.0), (1_000_000, 1500.0)]
    assert fit(noisy).latency_us == pytest.approx(10.0, rel=0.05)


# On ranks


def measured_models(rank: int, world: int, shape: tuple[int, int]) -> tuple[AlphaBeta, list[str]]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    lines: list[str] = []
    return measure(mesh, [4, 1000], 1, lines.append), lines


@pytest.mark.parametrize(("world", "shape"), [(1, (1, 1)), (2, (1, 2)), (3, (3, 1))])
def test_all_ranks_measure_the_same_model(world: int, shape: tuple[int, int]) -> None:
    first, *others = [model for model, _ in run_ranks(measured_models, world, shape)]
    assert others == [first] * (world - 1)
    assert [axis.size for axis in first.axes.values()] == list(shape)


def test_an_axis_of_one_rank_costs_nothing() -> None:
    model, lines = run_ranks(measured_models, 2, (1, 2))[0]
    assert model.axes["dp"].all_gather.latency_us == 0
    assert lines[0] == "dp: one rank, no plan sends along it"


def test_each_collective_and_the_copy_is_reported() -> None:
    lines = run_ranks(measured_models, 2, (2, 1))[0][1]
    assert [line.partition(":")[0] for line in lines] == [
        *(f"dp {kind}" for kind in COLLECTIVES),
        "tp",
        "copy",
    ]


@dataclass
class Run:
    """The outcome of the command under torchrun."""

    returncode: int
    output: str
    path: Path


def calibrate(path: Path, num_ranks: int, mesh: str) -> Run:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"),
            *("-m", "funcol", "calibrate", "--mesh", mesh, "--quick", "--out", str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Run(done.returncode, done.stdout + done.stderr, path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return calibrate(tmp_path_factory.mktemp("calibrate") / "costs.json", 2, "tp=2")


def test_every_rank_ends_well(run: Run) -> None:
    assert run.returncode == 0, run.output


def test_one_rank_reports(run: Run) -> None:
    assert run.output.count("tp all_reduce: ") == 1
    assert f"written to {run.path}" in run.output


def test_the_written_model_prices_plans(run: Run) -> None:
    model = AlphaBeta.load(run.path)
    made = funcol.plan_redistribution("P", "R", "tp=2", (1000,), "float32", cost_model=model)
    assert made.cost > 0


def test_a_mesh_of_another_size_than_the_world_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        main(["calibrate", "--mesh", "dp=2,tp=2", "--out", str(tmp_path / "costs.json")])
    assert "the mesh dp=2,tp=2 has 4 ranks, WORLD_SIZE is 3" in capsys.readouterr().err


def test_without_torchrun_the_command_says_how_to_start_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        main(["calibrate", "--mesh", "dp=2", "--out", str(tmp_path / "costs.json")])
    assert "torchrun --nproc-per-node 2 -m funcol calibrate" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        main(["calibrate", "--mesh", "dp=2", "--out", str(tmp_path / "missing" / "costs.json")])
    assert "there is no folder" in capsys.readouterr().err
    assert not dist.is_initialized()
