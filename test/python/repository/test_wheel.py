"""Which wheel tools/setup takes instead of a build, and what the sdist holds."""

from __future__ import annotations

import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import fitting_wheel
import pytest

ROOT = Path(__file__).resolve().parents[3]

THIS_PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
THIS_MACHINE = platform.machine()
OLD_PLATFORM = f"manylinux_2_17_{THIS_MACHINE}"
SOURCES = "0123456789abcdef  -"


def wheel_of(
    folder: Path,
    *,
    python: str = THIS_PYTHON,
    platforms: str = OLD_PLATFORM,
    minors: tuple[str, ...] = ("2_11", "2_15"),
    sources: str | None = SOURCES,
) -> Path:
    wheel = folder / f"funcol-0.2.0-{python}-{python}-{platforms}.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        for minor in minors:
            content.writestr(f"funcol/torch_{minor}/libfuncol.so", b"")
        if sources is not None:
            content.writestr("funcol/sources.sha256", f"{sources}\n")
    return wheel


@pytest.mark.parametrize("torch", ["2.11.0", "2.15.1"])
@pytest.mark.parametrize("platforms", [OLD_PLATFORM, f"manylinux_9_9_{THIS_MACHINE}.{OLD_PLATFORM}"])
def test_a_wheel_of_these_sources_fits(tmp_path: Path, torch: str, platforms: str) -> None:
    assert fitting_wheel.why_not(wheel_of(tmp_path, platforms=platforms), torch, SOURCES) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"python": "cp310"}, f"it is for Python cp310, this is {THIS_PYTHON}"),
        ({"platforms": f"manylinux_9_9_{THIS_MACHINE}"}, f"it is for manylinux_9_9_{THIS_MACHINE}"),
        ({"platforms": "manylinux_2_17_vax"}, "it is for manylinux_2_17_vax"),
        ({"platforms": "macosx_11_0_arm64"}, "it is for macosx_11_0_arm64"),
        ({"minors": ("2_1", "2_14")}, "it has no libraries for PyTorch 2.15.0"),
        ({"sources": "fedcba9876543210  -"}, "the sources have changed"),
        ({"sources": None}, "the sources have changed"),
    ],
    ids=["python", "newer glibc", "machine", "system", "minor", "sources", "unknown sources"],
)
def test_a_wheel_that_does_not_fit_is_left_with_the_reason(
    tmp_path: Path, changed: dict[str, object], reason: str
) -> None:
    said = fitting_wheel.why_not(wheel_of(tmp_path, **changed), "2.15.0", SOURCES)  # type: ignore[arg-type]
    assert said is not None
    assert said.startswith(reason)


def test_the_first_wheel_that_fits_is_printed_and_the_others_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other, fitting = wheel_of(tmp_path, python="cp310"), wheel_of(tmp_path)
    monkeypatch.setattr(fitting_wheel, "DIST", tmp_path)
    monkeypatch.setattr(sys, "argv", ["fitting_wheel.py", "2.15.0", SOURCES])
    fitting_wheel.main()
    printed = capsys.readouterr()
    assert printed.out == f"{fitting}\n"
    assert f"dist/{other.name} is not taken: it is for Python cp310" in printed.err


# The sdist


@pytest.fixture(scope="module")
def in_sdist(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    [made] = folder.iterdir()
    with tarfile.open(made) as content:
        return {name.partition("/")[2] for name in content.getnames()}


@pytest.mark.parametrize("part", ["csrc", "tools/cmake", "python/funcol"])
def test_the_sdist_has_all_sources(in_sdist: set[str], part: str) -> None:
    listed = subprocess.run(["git", "ls-files", part], cwd=ROOT, capture_output=True, text=True, check=True)
    sources = set(listed.stdout.split())
    assert len(sources) > 5
    assert sources - in_sdist == set()


@pytest.mark.parametrize("name", ["CMakeLists.txt", "setup.py", "pyproject.toml", "README.md", "LICENSE"])
def test_the_sdist_has_what_builds_it(in_sdist: set[str], name: str) -> None:
    assert name in in_sdist


def test_the_sdist_has_nothing_that_was_built(in_sdist: set[str]) -> None:
    built = {name for name in in_sdist if name.endswith((".so", ".pyc", "_build_info.py", ".o"))}
    assert built == set()
