"""``python -m funcol run``: a program as it is, with funcol installed, and a line of what funcol did."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import refusal

PROGRAM = """
import sys, tempfile
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed._functional_collectives import all_reduce
import beside

assert __name__ == "__main__"
dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
for _ in range(3):
    x = x + x
assert torch.equal(x, x)  # compares tensors of all ranks
print(beside.NAME, sys.argv[1:], all_reduce.__module__, x.full_tensor().sum().item())
dist.destroy_process_group()
"""
END = re.compile(
    r"funcol: (\d+) operators on DTensors in C\+\+, (?:none|(\d+)) left to PyTorch(?: \((.*)\))?; "
    r"(\d+) redistributions, which sent ([\d.]+ \w+)$"
)


def run_program(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "funcol", "run", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "__main__.py").write_text(PROGRAM)
    (tmp_path / "packed" / "beside.py").write_text("NAME = 'beside'")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.write(tmp_path / "packed" / "__main__.py", "__main__.py")
        archive.write(tmp_path / "packed" / "beside.py", "beside.py")
    return tmp_path


@pytest.mark.parametrize("program", [["train.py"], ["-m", "train"], ["packed"], ["packed.zip"]], ids=" ".join)
def test_an_unedited_program_runs_installed_and_ends_with_a_line(folder: Path, program: list[str]) -> None:
    done = run_program(folder, *program, "--steps", "-m", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "beside ['--steps', '-m', '3'] funcol.collectives.functions 128.0\n"
    end = END.match(done.stderr.splitlines()[-1])
    assert end is not None, done.stderr
    assert int(end[1]) >= 3
    assert "aten.equal.default: kind" in end[3]


MOVES = """
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))
x = DTensor.from_local(torch.ones(256), mesh, [Shard(0)])
for _ in range(5):
    x.redistribute(mesh, [Replicate()])
x.redistribute(mesh, [Shard(0)])
"""


def test_redistributions_and_their_bytes_are_counted(tmp_path: Path) -> None:
    (tmp_path / "moves.py").write_text(MOVES)
    end = END.match(run_program(tmp_path, "moves.py").stderr.splitlines()[-1])
    assert end is not None
    assert (end[4], end[5]) == ("5", "5.0 KiB")


@pytest.mark.parametrize(
    ("last", "status", "says"),
    [
        ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("import sys; sys.exit(3)", 3, ""),
    ],
    ids=["KeyError", "ValueError", "exit"],
)
def test_the_line_comes_after_errors_too_and_the_status_is_the_programs(
    tmp_path: Path, last: str, status: int, says: str
) -> None:
    (tmp_path / "fails.py").write_text(last)
    done = run_program(tmp_path, "fails.py")
    assert done.returncode == status
    lines = done.stderr.splitlines()
    assert len([line for line in lines if END.match(line)]) == 1
    assert says in lines[-1]
    if says:
        assert any("fails.py" in line for line in lines)


def test_other_ranks_print_no_line(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text("")
    assert run_program(tmp_path, "quiet.py", RANK="1").stderr == ""
    assert END.match(run_program(tmp_path, "quiet.py", RANK="0").stderr.strip())


@pytest.mark.parametrize(
    ("arguments", "says"), [([], "there is no program"), (["nowhere.py"], "there is no file nowhere.py")]
)
def test_what_is_no_program_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert says in refusal(capsys, "run", *arguments)
