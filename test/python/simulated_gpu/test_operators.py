from __future__ import annotations

import pytest
import torch
from simulated_gpu_runs import names_of_checks, run_checks


@pytest.mark.sampled(6)
@pytest.mark.skipif(
    torch.__version__ < "2.15", reason="on PyTorch 2.11 the program of all operators ends with a fault"
)
@pytest.mark.parametrize("check", names_of_checks("operators"))
def test_an_operator_gives_what_it_gives_on_the_cpu(check: str) -> None:
    assert run_checks("operators", "--seed", "5")[check] == ""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("check", names_of_checks("training"))
def test_training_goes_as_on_the_cpu(check: str) -> None:
    assert run_checks("training", "--seed", "5")[check] == ""
