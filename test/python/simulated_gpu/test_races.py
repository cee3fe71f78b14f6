from __future__ import annotations

import pytest
from simulated_gpu_runs import STATUS_AFTER_REPORTS, names_of_checks, run_checks, run_python

RACE = """
import torch
data, side = torch.zeros(8, device="cuda"), torch.cuda.Stream()
with torch.cuda.stream(side):
    data.add_(1)
torch.cuda.synchronize()
"""


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
