"""``python -m funcol plan --to-mesh``: who sends what to whom, as a table and drawn."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

import funcol
from funcol.__main__ import main
from funcol.redistribution.plan_drawing import mesh_change_as_svg

SVG = "{http://www.w3.org/2000/svg}"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    main(["plan", *arguments])
    return capsys.readouterr().out.splitlines()


def test_the_command_prints_the_matrix_of_a_collective(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--mesh", "dp=4,tp=2", "--to-mesh", "tp=8", "--shape", "4096x4096", "S0,S1", "S0")
    assert lines[0] == "4096x4096 float32 from dp=4, tp=2 (ranks 0-7) to tp=8 (ranks 0-7)"
    assert lines[2] == "least cost: S(0)S(1)->S(0)[0]S(0)[1]"
    assert any("all_to_all(dim 1 -> 0, tp)" in line for line in lines)
    begin = next(number for number, line in enumerate(lines) if line.split()[:1] == ["from"])
    assert lines[begin].split() == ["from", "/", "to", *map(str, range(8)), "sent"]
    assert lines[begin + 1].split() == ["0", "-", "4.0", "MiB", *"------", "4.0", "MiB"]
    assert lines[begin + 9].split()[0] == "received"
    assert lines[-1] == "busiest: rank 0, which sends 4.0 MiB; no plan has one that sends less than 4.0 MiB"


def test_the_command_prints_messages_between_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(
        capsys,
        *("--mesh", "dp=2", "--to-mesh", "tp=3", "--to-ranks", "4-5,9", "--shape", "6x4", "R", "S0"),
    )
    assert lines[0] == "6x4 float32 from dp=2 (ranks 0-1) to tp=3 (ranks 4,5,9)"
    [transfer] = [line for line in lines if "transfer" in line]
    assert transfer == ("  transfer R => S(0): 4 messages, busiest sender 48 B, least possible 48 B")
    assert [line.split() for line in lines if line.split()[:1] in (["0"], ["1"])] == [
        ["0", "-", "-", "32", "B", "16", "B", "-", "48", "B"],
        ["1", "-", "-", "-", "16", "B", "32", "B", "48", "B"],
    ]


def test_reductions_have_no_bound(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(
        capsys,
        *("--mesh", "dp=2", "--to-mesh", "tp=2", "--ranks", "2,3", "--shape", "64x64", "P", "S0"),
        *("--cost-model", "step-counts"),
    )
    assert any("reduce_scatter(sum, dim 0, dp)" in line for line in lines)
    assert lines[-1].startswith("busiest: rank 2, which sends")
    assert "no plan" not in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--mesh", "dp=2", "--ranks", "0,1", "R", "R"), "--ranks and --to-ranks are for plans between"),
        (("--mesh", "dp=2", "--to-mesh", "tp=2", "--to-ranks", "4", "R", "R"), "1 ranks for 2 coordinates"),
        (("--mesh", "dp=2", "--to-mesh", "tp=2", "--to-ranks", "4,4", "R", "R"), "lists a rank twice"),
        (("--mesh", "dp=2", "--to-mesh", "tp=2", "--to-ranks", "a", "R", "R"), "is not a rank"),
        (("--mesh", "dp=2", "--to-mesh", "tp=2", "R", "S5"), "does not have"),
    ],
)
def test_the_command_refuses(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--shape", "8x8", *arguments])
    assert text in capsys.readouterr().err


def elements(svg: str, kind: str) -> list[ElementTree.Element]:
    return [element for element in ElementTree.fromstring(svg).iter() if element.get("class") == kind]


def test_a_drawing_shows_from_whom_each_rank_has_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.svg"
    printed(
        capsys,
        *("--mesh", "dp=2", "--to-mesh", "tp=2", "--to-ranks", "1-2", "--shape", "8x8", "S0", "S1"),
        *("--svg", str(file)),
    )
    svg = file.read_text()
    assert len(elements(svg, "rank")) == 4
    colours = [element.get("fill") for element in elements(svg, "block")]
    # Two source ranks; each target rank has a block of either.
    first, second = colours[:2]
    assert first != second
    assert {*colours[2:4]} == {*colours[4:]} == {first, second}
    assert len(elements(svg, "sent")) == 9
    assert len(elements(svg, "bytes")) == 3


def test_a_drawing_of_a_collective_has_all_blocks() -> None:
    change = funcol.redistribution.plan_mesh_change("S0,S1", "S0", "dp=2,tp=2", "tp=4", (8, 8), "float32")
    assert change.transfer is None
    assert len(elements(mesh_change_as_svg(change), "block")) == 4 + 8


def test_too_many_ranks_are_not_drawn() -> None:
    change = funcol.redistribution.plan_mesh_change("S0", "S0", "dp=65", "tp=65", (130, 8), "float32")
    with pytest.raises(ValueError, match="65 ranks cannot be read"):
        mesh_change_as_svg(change)
