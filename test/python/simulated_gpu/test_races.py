from __future__ import annotations

from pathlib import Path

import pytest
from simulated_gpu_runs import STATUS_AFTER_REPORTS, names_of_checks, run_checks, run_python, start_python

RACE = """
import torch
data, side = torch.zeros(8, device="cuda"), torch.cuda.Stream()
with torch.cuda.stream(side):
    data.add_(1)
torch.cuda.synchronize()
"""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("check", names_of_checks("races"))
@pytest.mark.parametrize("seed", ["1", "2"])
def test_races_alone_are_reported(check: str, seed: str) -> None:
    assert run_checks("races", "--seed", seed)[check] == ""


def test_a_report_changes_the_exit_status_and_says_how_to_repeat_the_run() -> None:
    done = run_python("-c", RACE, options=("--seed", "11", "--order", "last"))
    assert done.returncode == STATUS_AFTER_REPORTS
    assert "--seed 11 --order last" in done.stderr
    assert 'File "<string>", line 5, in <module>' in done.stderr


def test_races_are_not_looked_for_if_told_so() -> None:
    done = run_python("-c", RACE, options=("--no-races",))
    assert (done.returncode, done.stderr) == (0, "")


TWO_ORDERS = """
import sys, torch, torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
device = torch.device("cuda", rank)
dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2, device_id=device)
groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
data = torch.ones(4, device=device)
for group in groups:
    dist.all_reduce(data, group=group)
torch.cuda.synchronize()
for group in groups if rank == 0 else reversed(groups):
    dist.all_reduce(data, group=group)
torch.cuda.synchronize()
"""


def test_groups_that_wait_for_each_other_are_reported(tmp_path: Path) -> None:
    ranks = [start_python("-c", TWO_ORDERS, str(rank), str(tmp_path / "store")) for rank in range(2)]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert any(rank.returncode != 0 for rank in ranks), errors  # the one that finds it: others may end before
    assert any("nothing can run: communicators wait for each other" in error for error in errors), errors
    assert any('File "<string>", line 12, in <module>' in error for error in errors), errors
