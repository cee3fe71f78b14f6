"""The drawings of plans in the documentation are those that funcol draws."""

from __future__ import annotations

import pytest
from guides import DOCS

import funcol
from funcol.redistribution.plan_drawing import plan_as_svg


@pytest.mark.parametrize(("name", "mesh"), [("plan", "dp=2,tp=4"), ("small_plan", "dp=2,tp=2")])
def test_a_drawing_is_what_funcol_draws(name: str, mesh: str) -> None:
    plan = funcol.plan_redistribution("P,S0", "S1,R", mesh, (64, 128), "float32")
    assert (DOCS / "pictures" / f"{name}.svg").read_text() == plan_as_svg(plan)
