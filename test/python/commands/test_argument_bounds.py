"""Numbers, ranks, meshes and texts of commands: within bounds, or refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import printed_or_refused, refusal
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis_settings import checked

import funcol
from funcol.__main__ import main

DIGITS = "9" * 5000
ON_MESH = ("plan", "--mesh", "dp=2", "--shape", "8x8")
BETWEEN = (*ON_MESH, "--to-mesh", "tp=2")
ENDS = ("S0", "R")

REFUSED = {
    "ranks to 10^12": ((*BETWEEN, "--ranks", "0-999999999999", *ENDS), '"0-999999999999" is not a rank'),
    "ranks in millions": ((*BETWEEN, "--ranks", "0-9999999", *ENDS), "lists more than 4096 ranks"),
    "many ranges": ((*BETWEEN, "--ranks", "0-4000,5000-5100", *ENDS), "lists more than 4096 ranks"),
    "a rank of 2^24": ((*BETWEEN, "--ranks", "1,16777216", *ENDS), '"16777216" is not a rank'),
    "a rank of 2^31": ((*BETWEEN, "--to-ranks", f"1,{2**31}", *ENDS), f'"{2**31}" is not a rank'),
    "a rank of 2^63": ((*BETWEEN, "--to-ranks", f"1,{2**63}", *ENDS), f'"{2**63}" is not a rank'),
    "a rank of 5000 digits": ((*BETWEEN, "--ranks", DIGITS, *ENDS), '999..." is not a rank'),
    "a rank that is a surrogate": ((*BETWEEN, "--ranks", "\ud800", *ENDS), r'"\ud800" is not a rank'),
    "ranks that count down": ((*BETWEEN, "--ranks", "5-4", *ENDS), '"5-4" is not a rank'),
    "three ends": ((*BETWEEN, "--ranks", "0-1-2", *ENDS), '"0-1-2" is not a rank'),
    "a size of 2^63": ((*ON_MESH, "--shape", f"{2**63}", *ENDS), f'"{2**63}" is not a shape'),
    "a size of 5000 digits": ((*ON_MESH, "--shape", DIGITS, *ENDS), '999..." is not a shape'),
    "2^50 elements": ((*ON_MESH, "--shape", f"{2**25}x{2**25}", *ENDS), "expected 2^48 elements at most"),
    "5000 dims": ((*ON_MESH, "--shape", "x".join(["1"] * 5000), *ENDS), "at most 16 are planned for"),
    "5000 large dims": ((*ON_MESH, "--shape", "x".join(["2"] * 5000), *ENDS), "expected 2^48 elements"),
    "a mesh of 2^31": ((*ON_MESH, "--mesh", f"dp={2**31}", *ENDS), "has more than 2147483647 ranks"),
    "a mesh of 2^63": ((*ON_MESH, "--mesh", f"dp={2**63}", *ENDS), "is not an axis"),
    "a mesh of 5000 digits": ((*ON_MESH, "--mesh", f"dp={DIGITS}", *ENDS), "is not an axis"),
    "a mesh with a surrogate": ((*ON_MESH, "--mesh", "\ud800=2", *ENDS), r"the mesh axis '\ud800' cannot be"),
    "a size that is a surrogate": ((*ON_MESH, "--mesh", "dp=\ud800", *ENDS), "is not an axis"),
    "a line break": ((*ON_MESH, "--mesh", "\n=2", *ENDS), r"'\n=2' is not an axis"),
    "a surrogate as source": ((*ON_MESH, "\ud800", "R"), r"the placements '\ud800' cannot be written"),
    "a surrogate as target": ((*ON_MESH, "R", "P(\ud800)"), r"the placements 'P(\ud800)' cannot be written"),
    "a surrogate between meshes": ((*BETWEEN, "R", "\ud800"), r"the placements '\ud800' cannot be written"),
    "a dim of 5000 digits": ((*ON_MESH, f"S{DIGITS}", "R"), "is not a placement"),
    "5000 placements": ((*ON_MESH, "R," * 5000, "R"), "is not a placement"),
    "a dtype of 5000 digits": ((*ON_MESH, "--dtype", DIGITS, *ENDS), "is not a dtype"),
    "a dtype of two lines": ((*ON_MESH, "--dtype", "x\ny", *ENDS), r"'x\ny' is not a dtype"),
    "2^63 bytes": ((*ON_MESH, "--max-bytes", f"{2**63}", *ENDS), "is not a number of bytes"),
    "bytes of 5000 digits": ((*ON_MESH, "--max-bytes", DIGITS, *ENDS), "is not a number of bytes"),
    "negative bytes": ((*ON_MESH, "--max-bytes", "-1", *ENDS), "is not a number of bytes"),
    "an order of 5000 digits": ((*ON_MESH, "--src-order", f"{DIGITS}:dp", *ENDS), "is not a shard order"),
    "an order with a surrogate": ((*ON_MESH, "--src-order", "0:\ud800", *ENDS), r"mesh axis '\ud800'"),
    "costs in a folder": ((*ON_MESH, "--cost-model", "/", *ENDS), "Is a directory: '/'"),
    "costs without an end": ((*ON_MESH, "--cost-model", "/dev/zero", *ENDS), "/dev/zero is not valid JSON"),
    "costs in no file": ((*ON_MESH, "--cost-model", "\0", *ENDS), "is not valid JSON of a cost model"),
    "a long name": ((*ON_MESH, "--cost-model", "a" * 5000, *ENDS), "File name too long"),
    "a drawing in a folder": ((*ON_MESH, "--svg", "/", *ENDS), "/ cannot be written: Is a directory"),
    "a drawing nowhere": ((*ON_MESH, "--svg", "/missing/a.svg", *ENDS), "/missing/a.svg cannot be written"),
    "a drawing that is a surrogate": ((*ON_MESH, "--svg", "\ud800", *ENDS), r"\ud800 cannot be written"),
    "a drawing of too many": ((*ON_MESH, "--mesh", "dp=65", "--svg", "x", *ENDS), "65 ranks cannot be read"),
    "a drawing of pieces": (
        (*ON_MESH, "--shape", "8192", "--svg", "x", "_S(0,2048)", "R"),
        "blocks of up to 2048 pieces",
    ),
    "source ranks": ((*BETWEEN, "--mesh", "dp=4097", *ENDS), "dp=4097 has 4097 ranks"),
    "target ranks": ((*BETWEEN, "--to-mesh", f"tp={2**31 - 1}", *ENDS), f"has {2**31 - 1} ranks"),
    "pairs of ranks": ((*BETWEEN, "--mesh", "dp=2000", "--to-mesh", "tp=2000", *ENDS), "4000000 pairs"),
    "pairs of pieces": (
        (*BETWEEN, "--shape", f"{2**40}", "_S(0, 10000000)", "S0"),
        "40000000 pairs of blocks",
    ),
    "an option that is unknown": ((*ON_MESH, "--bogus", *ENDS), "unrecognized arguments: --bogus"),
    "no mesh": (("plan", *ENDS), "the following arguments are required: --mesh"),
    "another device": (("calibrate", "--mesh", "a=2", "--out", "x", "--device", DIGITS), "invalid choice"),
    "ranks to calibrate": (("calibrate", "--mesh", f"a={2**31}", "--out", "x"), "has more than 2147483647"),
    "a folder to calibrate": (("calibrate", "--mesh", "a=2", "--out", "/"), "/ is a folder"),
}


@pytest.mark.parametrize(("arguments", "fault"), REFUSED.values(), ids=REFUSED)
def test_what_is_out_of_bounds_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    fault: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert fault in refusal(capsys, *arguments)


@checked(300)
@given(
    option=st.sampled_from(["--ranks", "--to-ranks", "--shape", "--mesh", "--to-mesh", "--max-bytes"]),
    text=st.text(alphabet="0123459-,=x \nadpt²٣\ud800", max_size=20),
)
@example(option="--mesh", text="a=32768,b=32768,c=2")
@example(option="--ranks", text="0,16777215")
def test_any_argument_is_read_or_refused(capsys: pytest.CaptureFixture[str], option: str, text: str) -> None:
    printed_or_refused(capsys, *BETWEEN, f"{option}={text}", *ENDS)


@pytest.mark.parametrize("rank", [-1, 2**24, 2**31, 2**63, 1.5, "1"])
def test_a_rank_that_no_world_has_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="expected numbers from 0 to 16777215"):
        funcol.redistribution.plan_mesh_change("R", "R", "dp=2", "tp=2", (8,), "float32", ranks=[0, rank])


def test_a_mesh_of_more_ranks_than_a_world_has_is_refused_between_meshes() -> None:
    with pytest.raises(ValueError, match="got rank 2147483646"):
        funcol.redistribution.plan_mesh_change("R", "R", {"dp": 2**31 - 1}, "tp=2", (8,), "float32")


# Many ranks


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    main(["plan", *arguments])
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("num_ranks", "is_summary"), [(64, False), (65, True)])
def test_a_matrix_has_at_most_64_ranks(
    capsys: pytest.CaptureFixture[str], num_ranks: int, is_summary: bool
) -> None:
    mesh = f"dp={num_ranks}"
    lines = printed(capsys, "--mesh", mesh, "--to-mesh", "tp=2", "--shape", "130x8", "S0", "S1")
    assert any(line.split()[:3] == ["from", "/", "to"] for line in lines) != is_summary
    assert any("pairs of a rank that sends" in line for line in lines) == is_summary
    assert lines[-1].startswith("busiest: rank ")


def test_a_summary_has_the_bytes_of_those_that_send_and_receive(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(
        capsys,
        *("--mesh", "dp=3,tp=40", "--to-mesh", "x=60", "--to-ranks", "200-259", "--shape", "960x960"),
        *("S0,R", "S1"),
    )
    assert [line.split() for line in lines[-6:-3]] == [
        ["ranks", "least", "most", "total"],
        ["send", "120", "of", "180", "30.0", "KiB", "30.0", "KiB", "3.5", "MiB"],
        ["receive", "60", "of", "180", "60.0", "KiB", "60.0", "KiB", "3.5", "MiB"],
    ]
    assert lines[-3] == "  240 pairs of a rank that sends and one that receives"


def test_many_ranks_in_no_order_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = ",".join(str(2 * rank) for rank in range(100))
    lines = printed(
        capsys, "--mesh", "dp=100", "--ranks", ranks, "--to-mesh", "x=2", "--shape", "8", "R", "S0"
    )
    assert lines[0] == "8 float32 from dp=100 (ranks 100 from 0 to 198) to x=2 (ranks 0-1)"


# Output that is not read


def ended(stdout: int, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "funcol", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [("info",), (*ON_MESH, *ENDS)])
def test_output_that_its_reader_has_closed_ends_the_command_without_a_word(
    arguments: tuple[str, ...],
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended(writer, *arguments) == (1, "")
    finally:
        os.close(writer)


def test_output_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("wb") as full:
        status, error = ended(full.fileno(), *ON_MESH, *ENDS)
    assert status == 2
    assert error.splitlines() == ["python -m funcol plan: [Errno 28] No space left on device"]
