"""The names of ``funcol``: what completes, what type checkers see, and the names that have moved."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import funcol

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python" / "funcol"
MOVED: dict[str, str] = funcol._MOVED
PACKAGES = {"collectives", "compiled", "installation", "local_map", "redistribution", "sharding", "weights"}


def test_the_names_are_sorted_and_there_once() -> None:
    assert funcol.__all__ == sorted(set(funcol.__all__))


def test_dir_has_the_public_names_and_packages_alone() -> None:
    assert dir(funcol) == sorted({*funcol.__all__, *PACKAGES})


def test_every_public_name_and_package_is_there() -> None:
    for name in dir(funcol):
        assert getattr(funcol, name) is not None


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'funcol' has no attribute 'all_reduse'"):
        funcol.all_reduse  # noqa: B018


def names_of_stub() -> tuple[set[str], list[str]]:
    """Returns the names that ``__init__.pyi`` imports, and its ``__all__``."""
    imported: set[str] = set()
    listed: list[str] = []
    for node in ast.parse((PACKAGE / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.asname is None for alias in node.names)
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            listed = ast.literal_eval(node.value)
    return imported, listed


def test_type_checkers_see_the_names_of_all() -> None:
    imported, listed = names_of_stub()
    assert listed == funcol.__all__
    assert imported == set(funcol.__all__)


# Type checkers


RIGHT = """
import funcol
import funcol.redistribution
from funcol import all_reduce, full_tensors, redistribute
from funcol.collectives import record_callers
from funcol.local_map import apply_local_map, local_map_hop
from funcol.redistribution import AlphaBeta, Owned, PartitionSpec
funcol.all_gather_tensor
funcol.check_agreement
funcol.plan_redistribution
funcol.redistribution.Plan
funcol.show
"""

WRONG = [
    "funcol.all_reduse",
    "funcol.redistribue",
    "funcol.full_tensor",
    "funcol.sys",
    "funcol.importlib",
    "funcol.Any",
    "funcol.AlphaBeta",
    "from funcol import nonsense",
    "from funcol.redistribution import AlfaBeta",
    "from funcol.weights import full_tensor",
    "from funcol.local_map import apply_locl_map",
]

# PyTorch's own types take minutes, and say nothing of these names.
MYPY = """
[mypy]
mypy_path = {path}
[mypy-torch.*]
follow_imports = skip
"""


def complaints_of_mypy(folder: Path, program: str) -> dict[int, str]:
    """Returns the errors of mypy about ``program``, by line."""
    (folder / "program.py").write_text(program)
    (folder / "mypy.ini").write_text(MYPY.format(path=PACKAGE.parent))
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--follow-imports", "silent"]
    done = subprocess.run(
        [*command, "program.py"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^program\.py:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    return {int(line): text for line, text in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mypy", reason="mypy is not installed")
    return tmp_path_factory.mktemp("checked")


def test_mypy_accepts_names_that_are_there(folder: Path) -> None:
    assert complaints_of_mypy(folder, RIGHT) == {}


def test_mypy_refuses_each_name_that_is_not(folder: Path) -> None:
    complaints = complaints_of_mypy(folder, "\n".join(["import funcol", *WRONG, ""]))
    assert sorted(complaints) == list(range(2, len(WRONG) + 2)), complaints
    assert all("has no attribute" in text for text in complaints.values()), complaints


# Names that have moved


@pytest.mark.parametrize("name", MOVED)
def test_a_moved_name_is_still_there_with_a_note(name: str) -> None:
    package = f"funcol.{MOVED[name]}"
    note = rf"funcol\.{name} has moved: use {package}\.{name}\. The old name goes with funcol 0\.4\."
    with pytest.warns(DeprecationWarning, match=note) as caught:
        found = getattr(funcol, name)
    assert [warning.filename for warning in caught] == [__file__]
    assert found is getattr(importlib.import_module(package), name)
    assert name in importlib.import_module(package).__all__
    assert name not in funcol.__all__


def test_a_moved_name_can_be_imported_from_the_top() -> None:
    with pytest.warns(DeprecationWarning, match="has moved"):
        from funcol import AlphaBeta
    assert AlphaBeta is funcol.redistribution.AlphaBeta


SOURCES = [
    path
    for folder in ("csrc", "docs", "python", "test", "tools")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".pyi", ".md", ".cpp", ".h", ".ipynb")
]


def test_the_project_uses_the_new_places() -> None:
    # Prefixes of messages name functions, not modules.
    old = re.compile(rf"\bfuncol\.({'|'.join(MOVED)})\b(?!:)|from funcol import .*\b({'|'.join(MOVED)})\b")
    found = [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in SOURCES
        if path != Path(__file__)
        for match in old.finditer(path.read_text())
    ]
    assert found == []


def test_the_page_of_versions_lists_the_moved_names() -> None:
    rows = re.findall(
        r"^\| `funcol\.(\w+)` \| (`.*`) \|$", (ROOT / "docs/versions.md").read_text(), re.MULTILINE
    )
    listed = {name: package for package, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed == MOVED
