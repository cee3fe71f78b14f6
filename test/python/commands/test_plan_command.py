"""``python -m funcol plan``: its tables and its drawings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from plans import MESH, axis_cost, model, plan
from processes import run_python

import funcol
from funcol.__main__ import main
from funcol.redistribution import Plan, StepCounts
from funcol.redistribution.plan_drawing import plan_as_svg

ARGUMENTS = ("plan", "--mesh", MESH, "--shape", "1024x4096", "--dtype", "bfloat16")


def test_the_command_prints_both_plans_as_tables() -> None:
    lines = run_python("-m", "funcol", *ARGUMENTS, "S0,S0", "S1,S1").splitlines()
    assert lines[0] == "1024x4096 bfloat16 on dp=2, tp=4"
    assert [line for line in lines if "least cost: " in line] == [
        f"least cost: {funcol.plan_redistribution('S0,S0', 'S1,S1', MESH, (1024, 4096), 'bfloat16')}"
    ]
    assert any(line.startswith("PyTorch's greedy plan: S(0)") for line in lines)
    assert sum(line.startswith("  total ") for line in lines) == 2


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    main(list(arguments))
    return capsys.readouterr().out.splitlines()


def test_a_line_of_the_table_is_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, *ARGUMENTS, "--cost-model", "step-counts", "S0,S1", "R,S1")
    [line] = {line for line in lines if "all_gather" in line}
    made = plan("S0,S1", "R,S1", shape=(1024, 2048), cost_model=StepCounts())
    assert line.split() == [
        "all_gather(dim",
        "0,",
        "dp)",
        "S(0)S(1)",
        "RS(1)",
        "1.0",
        "MiB",
        "2",
        *peak(made),
    ]


FORMS = {
    "S0,R": ["Shard(0),Replicate()", "(Shard(dim=0), Replicate())", "[Shard(0), Replicate()]", "S(0), R"],
    "P,P(avg)": ["Partial(),Partial(avg)", "Partial('sum'), Partial(reduce_op=\"avg\")", "(P, Partial(avg))"],
    "_S(1, 2),S1": ["_StridedShard(dim=1, sf=2), Shard(1)", "_StridedShard(1, split_factor=2),Shard(dim=1)"],
}


@pytest.mark.parametrize(("short", "long"), [(short, long) for short in FORMS for long in FORMS[short]])
def test_placements_may_be_written_as_pytorch_does(short: str, long: str) -> None:
    arguments = ("R,R", MESH, (16, 16))
    assert funcol.plan_redistribution(long, *arguments) == funcol.plan_redistribution(short, *arguments)


def test_the_command_takes_sizes_with_commas(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "--mesh", "2,4", "--shape", "64,128", "Shard(0),Replicate()", "Replicate(),Shard(1)")
    assert printed(capsys, *arguments)[0] == "64x128 float32 on axis0=2, axis1=4"


def test_the_dtype_is_float32_unless_it_is_given() -> None:
    arguments = ("S0,R", "R,R", MESH, (16, 16))
    assert funcol.plan_redistribution(*arguments) == funcol.plan_redistribution(*arguments, torch.float32)
    assert funcol.plan_redistribution(*arguments) != funcol.plan_redistribution(*arguments, torch.float64)


@pytest.mark.parametrize(
    ("layouts", "sentence"),
    [
        (("S0,S0", "S1,S1"), None),
        (("S0,R", "R,R"), "sends as many bytes and takes as much memory."),
        (("R,R", "R,R"), "sends as many bytes and takes as much memory."),
    ],
)
def test_a_plan_ends_with_what_it_saves(
    capsys: pytest.CaptureFixture[str], layouts: tuple[str, str], sentence: str | None
) -> None:
    last = printed(capsys, *ARGUMENTS, *layouts)[-1]
    arguments = (*layouts, MESH, (1024, 4096), "bfloat16")
    plans = funcol.plan_redistribution(*arguments), funcol.redistribution.greedy_redistribution(*arguments)
    sent, sent_by_greedy = (sum(step.bytes_sent for step in one.steps) for one in plans)
    if sentence is None:
        assert sent < sent_by_greedy
        assert f"sends {sent_by_greedy / sent:.3g}x fewer bytes and takes" in last
    else:
        assert last == f"Beside PyTorch's plan, that of least cost {sentence}"


def peak(made: Plan) -> list[str]:
    return [f"{made.peak_bytes / 2**20:.1f}", "MiB"]


def test_the_command_takes_orders_and_says_why_there_is_no_greedy_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys, *ARGUMENTS, "S0,S0", "S0,S0", "--src-order", "0:tp,dp", "--dst-order", "0:dp,tp")
    assert any(line.startswith("least cost: S(0)[1]S(0)[0]") for line in lines)
    assert any(line.startswith("PyTorch's greedy plan: none. greedy_redistribution: ") for line in lines)


def test_the_command_takes_a_measured_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model(dp=axis_cost(2, 1e6), tp=axis_cost(4)).save(tmp_path / "costs.json")
    arguments = (*ARGUMENTS, "--cost-model", str(tmp_path / "costs.json"), "S0,S1", "R,S1")
    assert any("1e+06" in line for line in printed(capsys, *arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("X,R", "R,R"), "'X' is not a placement"),
        (("S0,R", "R,R", "--max-bytes", "10"), "max_bytes="),
        (("S0,R", "R,R", "--cost-model", "no such file"), "No such file"),
        (("S0,R", "R,R", "--src-order", "0:cp"), "names the mesh axis 'cp'"),
        (("S0,R", "R,R", "--shape", "10,20x2"), '"10,20x2" is not a shape'),
        (("S0,R", "R,R", "--mesh", "2,tp=4"), "'2' in the mesh '2,tp=4' is not an axis"),
    ],
)
def test_wrong_arguments_of_the_command_end_it_with_the_reason(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*ARGUMENTS, *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# Drawings

SVG = "{http://www.w3.org/2000/svg}"


def groups(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [group for group in svg.iter(f"{SVG}g") if group.get("class") == name]


def blocks(cell: ElementTree.Element) -> list[ElementTree.Element]:
    return [rect for rect in cell.iter(f"{SVG}rect") if rect.get("class") == "block"]


def drawn(*arguments: Any, **options: Any) -> ElementTree.Element:
    return ElementTree.fromstring(plan_as_svg(plan(*arguments, **options)))


@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        ("S0,S0", "S1,S1", (16, 16)),
        ("S0,R", "R,S0", (7,)),
        ("R,R", "R,R", ()),
        ("P,S2", "S0,R", (3, 5, 9)),
        ("S0,R", "R,R", (0, 4)),
    ],
)
def test_a_drawing_has_a_panel_a_layout_and_a_cell_a_rank(src: str, dst: str, shape: tuple[int, ...]) -> None:
    made = plan(src, dst, shape=shape)
    svg = ElementTree.fromstring(plan_as_svg(made))
    panels = groups(svg, "panel")
    assert len(panels) == len(made.steps) + 1
    assert [len(groups(panel, "rank")) for panel in panels] == [8] * len(panels)


@pytest.mark.parametrize("shape", [(16, 16), (5, 3), (1, 1)])
def test_the_blocks_of_a_sharded_tensor_cover_it_once(shape: tuple[int, ...]) -> None:
    svg = drawn("S0,S1", "S0,S1", shape=shape)
    [whole, *_] = [rect for rect in svg.iter(f"{SVG}rect") if rect.get("class") == "whole"]

    def area(rect: ElementTree.Element) -> float:
        return float(rect.get("width", "0")) * float(rect.get("height", "0"))

    # Coordinates are rounded to a tenth of a pixel.
    assert sum(map(area, blocks(svg))) == pytest.approx(area(whole), rel=0.02)


def test_a_rank_that_holds_nothing_has_no_block() -> None:
    cells = groups(drawn("S0", "S0", mesh="x=3", shape=(2,)), "rank")
    assert [len(blocks(cell)) for cell in cells] == [1, 1, 0]


def test_a_strided_shard_is_drawn_in_pieces() -> None:
    cells = groups(drawn("_S(0, 2)", "_S(0, 2)", mesh="x=2", shape=(8,)), "rank")
    assert [len(blocks(cell)) for cell in cells] == [2, 2]


@pytest.mark.parametrize(("src", "hatched"), [("P", 2), ("P(max)", 2), ("R", 0), ("S0", 0)])
def test_partial_values_are_hatched(src: str, hatched: int) -> None:
    svg = drawn(src, src, mesh="x=2", shape=(4, 4))
    assert sum(block.get("fill") == "url(#partial)" for block in blocks(svg)) == hatched


@pytest.mark.parametrize(
    ("src", "dims"), [("S0,S2", "dims 0 and 2"), ("R,S1", "dims 1 and 3"), ("R,R", "dims 2 and 3")]
)
def test_of_many_dims_the_sharded_ones_are_drawn(src: str, dims: str) -> None:
    title = next(text.text for text in drawn(src, src, shape=(4, 8, 4, 4)).iter(f"{SVG}text"))
    assert title is not None
    assert title.endswith(f"drawn: {dims}")


def test_each_rank_has_a_colour_of_its_own() -> None:
    colours = {block.get("fill") for block in blocks(drawn("R,R", "R,R"))}
    assert len(colours) == math.prod((2, 4))


def test_too_many_ranks_to_read_are_refused() -> None:
    with pytest.raises(ValueError, match="a drawing of 65 ranks cannot be read; the most is 64"):
        plan_as_svg(plan("R", "R", mesh="x=65"))


def test_the_command_writes_the_drawing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    lines = printed(capsys, *ARGUMENTS, "S0,R", "R,S1", "--svg", str(path))
    assert lines[-1] == f"drawn in {path}"
    assert groups(ElementTree.parse(path).getroot(), "rank")
