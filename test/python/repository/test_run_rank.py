"""tools/run_rank.py: one rank in the terminal, the others beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "tools" / "run_rank.py"

FUNCTIONS = """
import torch
import funcol

def sums(rank, world, factor):
    breakpoint()
    return funcol.all_reduce(torch.tensor(float(factor + rank)), "sum").item()

def raises_on_rank_1(rank, world):
    if rank == 1:
        raise ValueError("broken")
"""


def run(folder: Path, *arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    path = folder / "functions_of_ranks.py"
    path.write_text(FUNCTIONS)
    rank, name, *more = arguments
    command = [sys.executable, str(PROGRAM), rank, f"{path}::{name}", *more]
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_breakpoint_stops_the_rank_of_the_terminal_alone(rank: str, tmp_path: Path) -> None:
    done = run(tmp_path, rank, "sums", "--world=2", "--args=3", typed="print(f'stopped in {rank}')\nc\n")
    assert done.returncode == 0, done.stderr
    assert f"stopped in {rank}" in done.stdout
    assert done.stdout.count("(Pdb)") == 2
    assert {"rank 0 returns 7.0", "rank 1 returns 7.0"} <= set(done.stdout.replace("(Pdb) ", "").splitlines())


def test_the_status_tells_of_another_rank_that_fails(tmp_path: Path) -> None:
    done = run(tmp_path, "0", "raises_on_rank_1")
    assert done.returncode == 1
    assert "ValueError: broken" in done.stderr


def test_a_rank_outside_of_the_world_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "2", "sums", "--world=2")
    assert done.returncode == 2
    assert "a rank below 2" in done.stderr
