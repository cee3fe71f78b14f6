"""Planted faults are named with module and kind, and correct programs have none."""

from __future__ import annotations

import functools
import importlib
import math
from dataclasses import dataclass

import pytest
from ranks import run_ranks

import funcol
from funcol.check.report import Report

DP_TP = {"dp": 2, "tp": 2}
DP = {"dp": 4}
TP, CP, EP, PP = {"tp": 4}, {"cp": 4}, {"ep": 4}, {"pp": 2}


@dataclass(frozen=True)
class Case:
    """A program of ``planted`` with a fault, and what the report has to say of it."""

    program: str
    mesh: dict[str, int]
    fault: str | None
    module: str = ""
    kind: str = ""
    tensor: str = ""
    dtype: str = "float64"


FAULTS = [
    Case("plain.tensor_parallel", DP_TP, "output_unreduced", "second.mlp.down", "never reduced"),
    Case("plain.tensor_parallel", DP_TP, "output_reduced_twice", "second.mlp", "reduced twice or scaled"),
    Case("plain.tensor_parallel", DP_TP, "input_gradient_unreduced", "second.mlp", "never reduced"),
    Case("plain.tensor_parallel", DP_TP, "bias_counted", "second.mlp.down", "reduced twice or scaled"),
    Case("plain.data_parallel", DP, "left_out", "norm", "never reduced", "bias.grad"),
    Case("plain.data_parallel", DP, "missing", "two", "missing on some ranks", "bias.grad"),
    Case("plain.data_parallel", DP, "scaled", "one", "reduced twice or scaled", "weight.grad"),
    Case("plain.data_parallel", DP, "rank_scaled", "one", "differs between ranks", "bias.grad"),
    Case("plain.data_parallel", DP, "stale_weight", "norm", "stale", "weight after the step"),
    Case("plain.data_parallel", DP, "uneven_mean", "", "wrong only where a dim does not divide"),
    Case("plain.replicated_by_ddp", DP, "unsynchronized", "two", "never reduced", "grad"),
    Case("fsdp.sharded", DP, "unmanaged", "1.norm", "never reduced", "weight.grad"),
    Case("fsdp.sharded", DP, "divided_too_little", "0.down", "reduced twice or scaled", "grad"),
    Case("fsdp.accumulated", DP, "unsynchronized", "2", "missing on some ranks", "grad"),
    Case("fsdp.checkpointed", DP, "scaled_block", "1.down", "reduced twice or scaled", "output"),
    Case("fsdp.mixed", DP, "reduced_in_bf16", "2", "lower precision than asked", "grad", "bfloat16"),
    Case("fsdp.compiled", DP, "scaled_block", "1", "reduced twice or scaled", "output"),
    Case(
        "two_axes.language_model", DP_TP, "scaled_loss", "blocks.1.attention.out", "reduced twice or scaled"
    ),
    Case("sequence.by_hand", TP, "norm_unreduced", "1.norm", "never reduced", "grad"),
    Case("sequence.by_hand", TP, "norm_averaged", "1.norm", "reduced twice or scaled", "weight.grad"),
    Case("sequence.by_hand", TP, "norm_differs", "1.norm", "differs between ranks", "weight.grad"),
    Case("sequence.by_hand", TP, "gathered_in_another_order", "1.gather", "shards in another order"),
    Case("sequence.of_dtensors", TP, "misdeclared", "1.mlp.down", "never reduced", "output"),
    Case("context.gathered", CP, "stale_keys", "1.keys", "stale", "output"),
    Case("context.gathered", CP, "rotated_keys", "1.keys", "shards in another order", "output"),
    Case("context.gathered", CP, "weights_unreduced", "1.value", "never reduced", "grad"),
    Case("expert.stacked", EP, "expert_gradient_averaged", "1.experts", "reduced twice or scaled", "grad"),
    Case("expert.stacked", EP, "router_unreduced", "1.router", "never reduced", "weight.grad"),
    Case("expert.stacked", EP, "expert_missing", "1.experts", "missing on some ranks", "weight.grad"),
    Case("expert.stacked", EP, "combined_twice", "1.experts", "reduced twice or scaled", "output"),
    Case("expert.stacked", EP, "wrong_expert", "1.experts", "wrong", "output"),
    Case("pipeline.staged", PP, "scaled", "first.2", "reduced twice or scaled", "grad"),
    Case("pipeline.staged", PP, "tied_unreduced", "embed", "never reduced", "weight.grad"),
]
CORRECT = [
    Case("plain.tensor_parallel", DP_TP, None),
    Case("plain.data_parallel", DP, None),
    Case("plain.data_parallel", DP, "uneven"),
    Case("plain.replicated_by_ddp", DP, None),
    Case("fsdp.sharded", DP, None),
    Case("fsdp.accumulated", DP, None),
    Case("fsdp.checkpointed", DP, None),
    Case("fsdp.mixed", DP, None),
    Case("fsdp.mixed", DP, None, dtype="bfloat16"),
    Case("fsdp.compiled", DP, None),
    Case("sequence.by_hand", TP, None),
    Case("sequence.of_dtensors", TP, None),
    Case("context.gathered", CP, None),
    Case("context.zigzag", CP, None),
    Case("expert.stacked", EP, None),
    Case("two_axes.language_model", DP_TP, None),
    Case("pipeline.staged", PP, None),
]


def name_of(case: Case) -> str:
    return f"{case.program}-{case.fault or 'correct'}-{case.dtype}"


def checked(rank: int, world: int, case: Case) -> Report:
    module, _, name = case.program.partition(".")
    program = getattr(importlib.import_module(f"planted.{module}"), name)
    return funcol.check(
        functools.partial(program, fault=case.fault),
        mesh_shape=tuple(case.mesh.values()),
        mesh_dim_names=tuple(case.mesh),
        dtype=case.dtype,
        timeout_s=50,
    )


@pytest.mark.parametrize("case", FAULTS, ids=name_of)
def test_a_fault_is_named_with_module_and_kind(case: Case) -> None:
    for report in run_ranks(checked, math.prod(case.mesh.values()), case):
        fault = report.faults[0]
        assert (fault.module, fault.kind) == (case.module, case.kind), str(report)
        assert case.tensor in fault.tensor


@pytest.mark.parametrize("case", CORRECT, ids=name_of)
def test_a_correct_program_has_no_fault(case: Case) -> None:
    for report in run_ranks(checked, math.prod(case.mesh.values()), case):
        assert report.ok, str(report)
