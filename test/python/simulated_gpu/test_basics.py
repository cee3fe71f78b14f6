from __future__ import annotations

import pytest
from simulated_gpu_runs import names_of_checks, run_checks


@pytest.mark.parametrize("check", names_of_checks("basics"))
@pytest.mark.parametrize("order", ["random", "last", "lazy", "first"])
def test_a_basic_works_in_every_order(check: str, order: str) -> None:
    assert run_checks("basics", "--seed", "3", "--order", order)[check] == ""
