"""``python -m funcol check``: exit status, reports, bad input, hangs, torchrun."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import funcol

PROGRAM = """
import torch, torch.distributed as dist
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))

def program(mesh):
    model = Model()
    x = torch.arange(24.0).reshape(6, 4).sin()
    loss = model(x if mesh is None else x.chunk(mesh.size())[mesh.get_rank()]).sum()
    loss.backward()
    if mesh is not None:
        for name, parameter in model.named_parameters():
            if LEFT_OUT not in name:
                dist.all_reduce(parameter.grad)
    return model, loss
"""
CORRECT = PROGRAM.replace("LEFT_OUT", "'three'")
FAULTY = PROGRAM.replace("LEFT_OUT", "'one.weight'")
HANGING = CORRECT.replace(
    "        return self.two",
    "        if dist.get_rank(): dist.recv(torch.zeros(1), 0)\n        return self.two",
)


def run_check(
    folder: Path, text: str, *arguments: str, launcher: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    file = folder / "model_check.py"
    file.write_text(text)
    command = [sys.executable, *launcher, "-m", "funcol", "check", str(file), "--mesh", "dp=2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_a_correct_program_ends_with_status_0(tmp_path: Path) -> None:
    done = run_check(tmp_path, CORRECT)
    assert done.returncode == 0, done.stderr
    assert "no fault" in done.stdout


def test_a_fault_ends_with_status_1_and_is_on_the_page_and_in_the_json(tmp_path: Path) -> None:
    page, data = tmp_path / "page.html", tmp_path / "report.json"
    done = run_check(tmp_path, FAULTY, "--html", str(page), "--json", str(data))
    assert done.returncode == 1, done.stderr
    assert "backward: one: never reduced" in done.stdout
    assert f"{tmp_path / 'model_check.py'}:11" in done.stdout
    [fault] = json.loads(data.read_text())["faults"]
    assert (fault["module"], fault["tensor"], fault["kind"]) == ("one", "weight.grad", "never reduced")
    [style] = re.findall(r'<span class="(r\d+)"> *one  Linear', page.read_text())
    assert re.search(rf"\.{style} {{[^}}]*background-color: #800000", page.read_text())


def test_a_hang_is_reported_with_the_module_of_each_rank(tmp_path: Path) -> None:
    done = run_check(tmp_path, HANGING, "--timeout", "15")
    assert done.returncode == 1, done.stderr
    assert "the parallel run: hang" in done.stdout
    assert "rank 0: stopped in no module" in done.stdout
    assert "rank 1: stopped in Model" in done.stdout


def test_ranks_of_torchrun_are_used(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_check(tmp_path, FAULTY, launcher=torchrun)
    assert done.returncode == 1
    assert done.stdout.count("backward: one: never reduced") == 1


SHARDED = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

def program(mesh):
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3))
    x = torch.arange(24.0).reshape(6, 4).sin()
    if mesh is not None:
        fully_shard(model, mesh=mesh, ignored_params=IGNORED)
        x = x.chunk(mesh.size())[mesh.get_rank()]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    loss = model(x).square().mean()
    loss.backward()
    return model, loss, optimizer
"""


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("ignored", "status", "said"),
    [("set()", 0, "no fault"), ("{model[2].weight}", 1, "backward: 2: never reduced")],
)
def test_ranks_run_on_devices(tmp_path: Path, ignored: str, status: int, said: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 devices, and there are {torch.cuda.device_count()}")
    done = run_check(tmp_path, SHARDED.replace("IGNORED", ignored), "--device", "cuda")
    assert done.returncode == status, done.stdout + done.stderr
    assert said in done.stdout


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1", "defines no function program(mesh)"),
        ("def program(mesh): return 3", "program(mesh) returned int, expected model, loss"),
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError"),
        (
            "def program(mesh): raise KeyError('lost')",
            "the reference run, program(None), ended with KeyError",
        ),
        (
            CORRECT.replace("model = Model()", "model = Model() if mesh else nn.Linear(4, 4)"),
            "of other names",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path: Path, text: str, error: str) -> None:
    done = run_check(tmp_path, text)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("python -m funcol check: ")
    assert error in line


def raises_on_a_mesh(mesh: DeviceMesh | None) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if mesh is not None:
        model[1] = nn.Linear(3, 2)
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    return model, loss


def test_an_error_of_the_parallel_run_is_a_fault() -> None:
    report = funcol.check(raises_on_a_mesh, mesh_shape=(2,))
    [fault] = report.faults
    assert fault.kind == "raised"
    assert "RuntimeError" in fault.detail


def test_a_program_that_ranks_cannot_find_is_refused() -> None:
    with pytest.raises(ValueError, match="Define it at the top of a module"):
        funcol.check(lambda mesh: None, mesh_shape=(2,))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"mesh_shape": (0,)}, "each at least 1"),
        ({"mesh_shape": (2, 2), "mesh_dim_names": ("dp",)}, "2 axes and 1 names"),
        ({"mesh_shape": (2,), "dtype": "int8"}, "expected one of float64"),
    ],
)
def test_a_wrong_option_is_refused(given: dict[str, object], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        funcol.check(raises_on_a_mesh, **given)  # type: ignore[arg-type]


def drops(mesh: DeviceMesh | None) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    loss = model(x if mesh is None else x.chunk(mesh.size())[mesh.get_rank()]).sum()
    loss.backward()
    return model, loss


def test_draws_that_cannot_be_matched_are_named() -> None:
    [fault] = funcol.check(drops, mesh_shape=(2,), mesh_dim_names=("dp",)).faults
    assert (fault.module, fault.kind) == ("1", "random draws")
    assert "switch dropout off" in fault.detail


def test_values_beyond_the_bound_are_compared_from_files() -> None:
    report = funcol.check(drops, mesh_shape=(1,), max_bytes=64)
    assert report.ok, str(report)
    assert len([one for one in report.findings if one.agrees]) > 8
