"""The demo fits a screen, prints what it measured, and the README's values are its values."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import demo
import pytest
import step_chart
from demo_overlap import Overlap
from demo_right import LINES, Values
from guides import on_the_newest_pytorch

ROOT = Path(__file__).resolve().parents[3]
SLOW, FAST = Overlap(60.0, 120.0, 121.0, 59.0), Overlap(0.1, 60.0, 61.0, 59.0)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "demo.py"), "--steps", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "timeline.png"


@pytest.fixture(scope="module")
def report(picture: Path) -> str:
    done = run("--picture", str(picture))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_report_has_its_three_parts(report: str) -> None:
    assert re.findall(r"^[A-Z]{3,}", report, re.MULTILINE) == ["SPEED", "RIGHT", "OVERLAP"]


def test_the_report_fits_a_terminal(report: str, picture: Path) -> None:
    lines = report.replace(str(picture), "demo_timeline.png").splitlines()
    assert len(lines) <= 24
    assert [line for line in lines if len(line) > 80] == []


def test_both_sides_have_the_same_losses(report: str) -> None:
    assert re.search(r"loss after 2 steps: (\d\.\d{6}), \1", report)


@pytest.mark.parametrize("name", LINES)
def test_a_line_is_right_on_funcol_alone(report: str, name: str) -> None:
    found = re.search(rf"^  {re.escape(name)} +(\S+) +(\S+) +(\S+)(  <- stock)?$", report, re.MULTILINE)
    assert found is not None, report
    one_device, stock, funcol, mark = found.groups()
    assert funcol == one_device != stock
    assert (mark is None) == (stock == "refused")


def test_the_picture_is_drawn(report: str, picture: Path) -> None:
    assert str(picture) in report
    assert picture.read_bytes().startswith(b"\x89PNG")


@on_the_newest_pytorch
def test_the_values_of_the_readme_are_those_of_the_demo(report: str) -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| (\S+) \| \*\*(\S+)\*\* \| (\S+) \|$", readme, re.MULTILINE)
    assert len(rows) == 3
    for name, *values in rows:
        assert re.search(
            rf"^  {re.escape(name)} +{' +'.join(map(re.escape, values))}  <- stock$", report, re.M
        )


def test_a_quick_run_draws_nothing(tmp_path: Path) -> None:
    done = run("--quick", "--picture", str(tmp_path / "timeline.png"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OVERLAP" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_full_run_draws_the_timelines_of_the_example(tmp_path: Path) -> None:
    done = run("--full", "--picture", str(tmp_path / "timeline.png"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses agree" in done.stdout
    assert (tmp_path / "lm_timeline_funcol.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--steps", "0"], "needs at least 1 step"),
        (["--picture", "missing/timeline.png"], "there is no folder"),
        (["--quick", "--full"], "not allowed with"),
    ],
)
def test_arguments_are_refused_before_anything_runs(arguments: list[str], reason: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert reason in done.stderr


def test_a_title_states_the_gain_also_where_there_is_none() -> None:
    assert demo.title({"stock": SLOW, "funcol": FAST}).endswith(
        ": 121 ms on stock PyTorch, 61 ms on funcol, 2.0x"
    )
    assert demo.title({"stock": FAST, "funcol": SLOW}).endswith(
        ": 61 ms on stock PyTorch, 121 ms on funcol, 0.5x"
    )


def test_bars_are_as_long_as_their_parts_of_the_longest() -> None:
    stock, funcol = demo.bars({"stock": 20.0, "funcol": 5.0}, "ms")
    assert (stock.count("#"), funcol.count("#")) == (demo.BAR, demo.BAR // 4)


@pytest.mark.parametrize(
    ("losses", "value", "expected"),
    [([1.0, 2.0], 7.0, []), ([1.0, 2.1], 7.0, ["losses differ"]), ([1.0, 2.0], 6.0, ["a line"])],
)
def test_wrong_losses_and_values_fail(losses: list[float], value: float, expected: list[str]) -> None:
    found: dict[str, Any] = {"speed": {"stock": {"losses": [1.0, 2.0]}, "funcol": {"losses": losses}}}
    failures = demo.failures(found, {"a line": Values(7.0, 0.0, value)})
    assert [failure.startswith(start) for failure, start in zip(failures, expected, strict=True)] == [
        True for _ in expected
    ]


def test_a_wrong_value_of_funcol_is_marked_like_one_of_stock() -> None:
    assert demo.of_right({"a line": Values(7.0, 7.0, 6.0)})[-1].endswith("<- funcol")


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.618, "1.62x"), (7.45, "7.5x"), (17.7, "18x"), (1122.0, "1100x")]
)
def test_ratios_have_two_digits_or_three(ratio: float, text: str) -> None:
    assert step_chart.as_ratio(ratio) == text
