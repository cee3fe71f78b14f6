"""Correct programs of the examples, torchtitan and transformers have no fault, uneven sizes included."""

from __future__ import annotations

import functools
from typing import Any

import library_programs
import pytest

import funcol

DP_TP = {"dp": 2, "tp": 2}


@pytest.mark.parametrize(
    ("library", "program", "mesh", "sizes"),
    [
        (None, "language_model", DP_TP, {"width": 16, "hidden": 24, "length": 8}),
        (None, "language_model", DP_TP, {"width": 16, "hidden": 22, "length": 8}),
        (None, "muon", {"dp": 4}, {"width": 8}),
        (None, "muon", {"dp": 4}, {"width": 7}),
        ("accelerate", "accelerate_fsdp2", {"dp": 2}, {"width": 64}),
        ("accelerate", "accelerate_fsdp2", {"dp": 4}, {"width": 63}),
        ("torchtitan", "torchtitan_llama", DP_TP, {"backend": "partial_dtensor", "length": 16}),
        ("torchtitan", "torchtitan_llama", DP_TP, {"backend": "partial_dtensor", "length": 15}),
        ("transformers", "transformers_llama", {"tp": 2}, {"hidden": 64, "length": 16}),
        ("transformers", "transformers_llama", {"tp": 4}, {"hidden": 66, "length": 15}),
        ("transformers", "transformers_moe", {"ep": 2}, {"length": 16}),
        ("transformers", "transformers_moe", {"ep": 4}, {"length": 15}),
    ],
)
def test_a_correct_program_has_no_fault(
    library: str | None, program: str, mesh: dict[str, int], sizes: dict[str, Any]
) -> None:
    if library is not None:
        pytest.importorskip(library)
    report = funcol.check(
        functools.partial(getattr(library_programs, program), **sizes),
        mesh_shape=tuple(mesh.values()),
        mesh_dim_names=tuple(mesh),
    )
    assert report.ok, str(report)
    assert report.parallel_norm == pytest.approx(report.gradient_norm) or report.parallel_norm is None
