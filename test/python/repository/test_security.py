"""Promises of SECURITY.md about the sources: no pickle is read, no text is run, no object is received."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import funcol

SOURCES = sorted(Path(funcol.__file__).parent.rglob("*.py"))

MODULES = {"runpy", "pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "subprocess", "socket"}
NAMES = {"eval", "exec", "compile", "__import__"}
OBJECTS = {".gather_object", ".all_gather_object", ".broadcast_object_list", ".scatter_object_list"}
OBJECTS |= {".recv_object_list", ".send_object_list"}
# The module that SECURITY.md names: a command that runs a program.
ALLOWED = {"commands/run.py": {"runpy"}}
REFUSED = MODULES | NAMES | OBJECTS | {"torch.load", ".system"}


def used_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id
        elif isinstance(node, ast.Attribute):
            yield f".{node.attr}"
            if node.attr == "load" and isinstance(node.value, ast.Name):
                yield f"{node.value.id}.load"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: "/".join(path.parts[-2:]))
def test_no_source_reads_pickles_runs_text_or_takes_objects_from_peers(source: Path) -> None:
    assert set(used_in(source.read_text())) & REFUSED == ALLOWED.get("/".join(source.parts[-2:]), set())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import pickle", "pickle"),
        ("import runpy", "runpy"),
        ("from torch import nn\neval('1')", "eval"),
        ("dist.all_gather_object([], 1)", ".all_gather_object"),
        ("torch.load('x')", "torch.load"),
    ],
)
def test_the_search_finds_what_it_is_for(text: str, found: str) -> None:
    assert set(used_in(text)) & REFUSED == {found}
