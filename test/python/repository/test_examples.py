"""The examples run, and their reports hold what they promise."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "tools" / "examples"
SIDES = ("stock", "funcol")


def blocks_of_readme(language: str) -> list[str]:
    """Texts of the code blocks in ``language`` of the README's example, in order."""
    example = (ROOT / "README.md").read_text().split("<!-- the example -->")[1]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", example, re.MULTILINE | re.DOTALL)
    return [text for written_in, text in blocks if written_in == language]


def test_the_example_of_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(blocks_of_readme("python")[0])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(example)],
            env=os.environ | rendezvous | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "".join(printed) == blocks_of_readme("")[0]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "tensor_parallel_lm.py"), "--pictures", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def report(pictures: Path) -> str:
    """Returns the report of two steps on stock and two on funcol."""
    done = run("--steps", "2", folder=pictures)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def numbers(report: str, title: str) -> list[float]:
    """Returns the two numbers in the line ``title`` of the report's table."""
    number = r"\s+(-?\d+(?:\.\d+)?)"
    found = re.search(rf"^\s+{re.escape(title)}{number}{number}$", report, re.MULTILINE)
    assert found is not None, f"no line '{title}' in\n{report}"
    return [float(text) for text in found.groups()]


def test_a_language_model_has_the_losses_of_stock(report: str) -> None:
    assert "losses agree over all 2 steps" in report


def test_a_language_model_learns(report: str) -> None:
    first, second = numbers(report, "loss at step 1"), numbers(report, "loss at step 2")
    assert all(after < before for before, after in zip(first, second, strict=True))


def test_what_a_step_is_divided_into_adds_up_to_it(report: str) -> None:
    parts = [
        "operators, no collective",
        "operators beside collectives",
        "collectives, no operator",
        "DTensor, FSDP2, autograd, Python",
    ]
    sums = [sum(of_side) for of_side in zip(*(numbers(report, part) for part in parts), strict=True)]
    # Each of the numbers is rounded to a tenth.
    assert sums == pytest.approx(numbers(report, "a profiled step, ms (mean)"), abs=0.3)


@pytest.mark.parametrize("part", ["step, ms (median)", "forward", "backward", "optimizer"])
def test_each_part_of_a_step_takes_time(report: str, part: str) -> None:
    title = f"a {part}" if part.startswith("step") else part
    assert min(numbers(report, title)) > 0


@pytest.mark.parametrize("side", SIDES)
def test_each_side_has_a_picture(report: str, pictures: Path, side: str) -> None:
    assert (pictures / f"lm_timeline_{side}.png").read_bytes().startswith(b"\x89PNG")


def test_no_steps_are_refused(tmp_path: Path) -> None:
    done = run("--steps", "0", folder=tmp_path)
    assert done.returncode == 2
    assert "needs at least 1 step" in done.stderr


def test_a_missing_folder_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = run(folder=tmp_path / "missing")
    assert done.returncode == 2
    assert "there is no folder" in done.stderr


@pytest.mark.long
def test_torchtitan_has_the_losses_of_stock() -> None:
    pytest.importorskip("torchtitan")
    command = [sys.executable, str(EXAMPLES / "torchtitan_trainer.py"), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    for way in ("eager", "compiled"):
        assert f"{way}: all losses and norms agree" in done.stdout


@pytest.mark.long
def test_muon_by_owners_has_the_weights_of_stock_for_half_of_the_bytes() -> None:
    command = [sys.executable, str(EXAMPLES / "muon.py"), "--steps", "20", "--width", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same weights in all ways" in done.stdout
    sent = {
        name: float(mebibytes)
        for name, mebibytes in re.findall(r"^(\w+) .* ([\d.]+)$", done.stdout, re.MULTILINE)
    }
    assert sent["owners"] <= 0.6 * sent["gathered"]  # headers of messages count, too
