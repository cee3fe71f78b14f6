"""The guard against slowdowns: what it makes of counts, and that every path that it counts runs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import hot_paths
import instructions
import pytest
import torch
from hot_paths import HotPath
from instructions import NUM_ROUNDS, STORED, Row, Stored, count_paths, instructions_of, report, rows

Printed = pytest.CaptureFixture[str]
VERSIONS = {"compiler": "GNU 12.2.0", "PyTorch": "2.15.0"}


def test_a_path_above_the_limit_fails_and_prints_both_counts(capsys: Printed) -> None:
    assert report(rows({"add": 100_000, "mm": 2_000}, {"add": 105_001, "mm": 2_000})) == 1
    [failure] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert "add: 100,000 instructions before, 105,001 now" in failure


@pytest.mark.parametrize("now", [1, 99_000, 100_000, 105_000])
def test_a_path_within_the_limit_passes(now: int) -> None:
    assert report(rows({"add": 100_000}, {"add": now})) == 0


@pytest.mark.parametrize("row", [Row("add", None, 100), Row("add", 100, None)])
def test_a_path_that_is_not_in_both_fails_and_asks_for_an_update(row: Row, capsys: Printed) -> None:
    assert report([row]) == 1
    assert "add: " in (printed := capsys.readouterr().out)
    assert "run --update" in printed


def test_only_paths_with_the_text_in_their_names_are_compared() -> None:
    assert rows({"plan a": 1, "add": 2}, {"plan a": 3}, only="plan") == [Row("plan a", 1, 3)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """Returns the counts that the command finds, with made-up versions and a file of its own."""
    counts = {"add": 105}
    monkeypatch.setattr(instructions.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(instructions, "running_versions", lambda: VERSIONS)
    monkeypatch.setattr(instructions, "counted", lambda only: counts)
    monkeypatch.setattr(instructions, "STORED", tmp_path / "counts.json")
    return counts


def test_counts_of_another_compiler_are_not_compared(counted: dict[str, int], capsys: Printed) -> None:
    Stored({**VERSIONS, "compiler": "Clang 19"}, {"add": 1}).write(instructions.STORED)
    assert instructions.run(update=False, only="") == 0
    [line] = capsys.readouterr().out.splitlines()
    assert "compiler Clang 19 (now GNU 12.2.0)" in line


def test_an_update_stores_counts_that_the_next_run_compares(counted: dict[str, int]) -> None:
    assert instructions.run(update=True, only="") == 0
    assert Stored.read(instructions.STORED) == Stored(VERSIONS, {"add": 105})
    assert instructions.run(update=False, only="") == 0
    counted["add"] = 111
    assert instructions.run(update=False, only="") == 1


def test_a_missing_valgrind_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Printed) -> None:
    monkeypatch.setattr(instructions.shutil, "which", lambda tool: None if tool == "valgrind" else tool)
    assert instructions.run(update=False, only="") == 2
    assert capsys.readouterr().err.splitlines() == [
        "valgrind not found: instructions are counted by valgrind"
    ]


def dump_of(label: str, instructions: int) -> str:
    return f"desc: Trigger: Client Request: {label}\nfn=(1)\n+3 7\nsummary: {instructions}\ntotals: 9\n"


def test_the_median_of_the_rounds_is_a_paths_count() -> None:
    dumps = [dump_of("4 mm, missed", rounds) for rounds in (400, 900, 404)]
    assert instructions_of([*dumps, dump_of("1 add", 7)]) == {"mm, missed": 101, "add": 7}


def test_the_dump_at_exit_does_not_count() -> None:
    assert instructions_of(["desc: Trigger: Program termination\nsummary: 5\n"]) == {}


class Log:
    """A counter that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def zero(self) -> None:
        self.calls.append("zero")

    def dump(self, label: bytes) -> None:
        self.calls.append(label.decode())


def test_a_path_is_counted_in_rounds_after_as_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    path = HotPath("add", lambda: log.calls.append("call"), num_calls=2)
    monkeypatch.setattr(hot_paths, "import_modules", lambda: None)
    monkeypatch.setattr(hot_paths, "hot_paths", lambda: iter([HotPath("mm", pytest.fail), path]))
    count_paths(log, only="add")
    counted = ["zero", "call", "call", "2 add"] * NUM_ROUNDS
    assert log.calls == ["start", *["call"] * 2 * NUM_ROUNDS, *counted]


@pytest.mark.skipif(
    Stored.read(STORED).versions["PyTorch"] != str(torch.__version__),
    reason="instructions are counted for one PyTorch",
)
@pytest.mark.parametrize("subject", hot_paths.SUBJECTS)
def test_every_path_runs(subject: Callable[[], Iterator[HotPath]]) -> None:
    names = []
    for path in subject():
        path.call()
        names.append(path.name)
    assert names
    assert len(set(names)) == len(names)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="no valgrind: apt-get install valgrind")
def test_valgrind_counts_the_paths_that_are_named() -> None:
    counts = instructions.counted("plan")
    assert all(name.startswith("plan") for name in counts)
    assert min(counts.values()) > 1000
