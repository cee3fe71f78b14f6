"""Layouts that are declared, weights that are cut, and the norm of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted import by_program, fsdp, plain
from ranks import run_ranks
from torch import nn
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

import funcol
from funcol.check.report import Report

Layouts = dict[str, tuple[str, ...]]

WEIGHTS: Layouts = {"up.weight": ("S0", "R"), "down.weight": ("S1", "R")}


def checked(rank: int, world: int, program: Callable[..., Any], layouts: Layouts) -> Report:
    return funcol.check(
        program, mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"), layouts=layouts, timeout_s=50
    )


def test_weights_that_the_program_has_cut_over_another_axis_are_its_own() -> None:
    for report in run_ranks(checked, 4, by_program.cut, {}):
        assert report.ok, str(report)


def test_weights_that_ranks_draw_get_the_blocks_of_their_declared_axis() -> None:
    for report in run_ranks(checked, 4, by_program.drawn, WEIGHTS):
        assert report.ok, str(report)
        layouts = {one.module: one.layout for one in report.findings if one.kind == "grad"}
        assert layouts == {"up": "dp: S0, tp: R", "down": "dp: S1, tp: R"}


def test_weights_with_the_blocks_of_another_axis_make_a_fault() -> None:
    for report in run_ranks(
        checked, 4, by_program.drawn, {"up.weight": ("R", "S0"), "down.weight": ("R", "S1")}
    ):
        assert not report.ok


@pytest.mark.parametrize(("ops", "agrees"), [(("S2", "R"), True), (("R", "R"), False), (("S2", "S2"), False)])
def test_an_output_agrees_in_its_declared_layout_alone(ops: tuple[str, ...], agrees: bool) -> None:
    for report in run_ranks(checked, 4, by_program.drawn, WEIGHTS | {"up": ops}):
        found = [one.agrees for one in report.findings if (one.module, one.kind) == ("up", "output")]
        assert found == [agrees]


def test_a_layout_with_too_few_ops_is_refused() -> None:
    with pytest.raises(ValueError, match="layout of 'up' has 1 ops, expected one for each of dp, tp"):
        funcol.check(by_program.drawn, mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"), layouts={"up": ("R",)})


def norm_of(rank: int, world: int, program: Callable[..., Any], fault: str | None) -> Report:
    def with_fault(mesh: Any) -> Any:
        return program(mesh, fault)

    return funcol.check(with_fault, mesh_shape=(world,), mesh_dim_names=("dp",), timeout_s=50)


@pytest.mark.parametrize("program", [fsdp.sharded, plain.data_parallel], ids=["dtensors", "replicas"])
def test_the_norm_of_the_parallel_runs_gradients_is_compared_and_printed(program: Callable[..., Any]) -> None:
    for report in run_ranks(norm_of, 4, program, None):
        assert report.parallel_norm == pytest.approx(report.gradient_norm, rel=1e-12)
        assert f"gradient norm {report.gradient_norm:.6g}; of the parallel run: " in str(report)
        assert [one.agrees for one in report.findings if one.kind == "norm"] == [True]


def wrong_norm(rank: int, world: int) -> Report:
    real = torch.nn.utils.get_total_norm
    calls = []

    def doubled(tensors: Any) -> Any:
        calls.append(tensors)
        is_of_reference = rank == 0 and len(calls) == 1
        return real(tensors) * (1 if is_of_reference else 2)

    torch.nn.utils.get_total_norm = doubled
    try:
        return norm_of(rank, world, fsdp.sharded, None)
    finally:
        torch.nn.utils.get_total_norm = real


def test_a_norm_that_differs_although_all_gradients_agree_is_a_fault() -> None:
    for report in run_ranks(wrong_norm, 4):
        [fault] = report.faults
        assert (fault.direction, fault.tensor, fault.kind) == ("norm", "the norm of all gradients", "wrong")


def test_plain_shards_have_no_norm_that_ranks_know() -> None:
    for report in run_ranks(checked, 4, by_program.drawn, WEIGHTS):
        assert report.parallel_norm is None
        assert "of the parallel run: not known" in str(report)


def drops_on_dtensors(mesh: Any) -> Any:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    x = torch.arange(32.0).reshape(8, 4).sin()
    if mesh is not None:
        x = distribute_tensor(x, mesh, [Shard(0)])
        for module in model[0], model[2]:
            distribute_module(module, mesh)
    loss = model(x).square().sum()
    loss.backward()
    return model, loss


def dropping(rank: int, world: int) -> Report:
    with funcol.installed():
        return funcol.check(drops_on_dtensors, mesh_shape=(world,), timeout_s=50)


def test_random_operators_draw_those_of_the_full_tensor() -> None:
    for report in run_ranks(dropping, 2):
        assert report.ok, str(report)
        assert report.drawing == ["", "1"]


def of_another_mesh(rank: int, world: int) -> str:
    try:
        funcol.check(by_program.cut, mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_mesh_that_does_not_fit_the_ranks_is_refused() -> None:
    message = "the mesh (2, 2) has 4 ranks, and 2 run. Start as many ranks as the mesh has."
    assert run_ranks(of_another_mesh, 2) == [message] * 2
