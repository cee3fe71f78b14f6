"""Checks the imports between the project's rooms: none to the right, none in a circle.

    python tools/check_rooms.py

A room is a folder, or a module outside of all folders; the folders below it belong to it, unless they are in
the list themselves. A file may import files of its own room and of rooms to the left of it. All imports
count, also within functions and for type checkers. A Python module uses no name of another module that begins
with an underscore; a package may make such a name: ``from .module import name as _name``.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

PYTHON = ROOT / "python" / "funcol"
# From left to right. What shares an entry stands side by side: neither may import the other.
PYTHON_ROOMS = [
    {"_C", "_build_info", "_compat", "_progress", "_version_check"},
    {"collectives"},
    {"redistribution"},
    {"weights"},
    {"sharding"},
    {"local_map"},
    {"compiled"},
    {"installation"},
    {"check"},
    {"commands"},
    {"__init__"},
    {"__main__"},
]

CPP = ROOT / "csrc"
CPP_ROOMS = [
    {"compat", "kernels", "layout"},
    {"planner"},
    {"propagation"},
    {"comm"},
    {"async"},
    {"metas", "ops"},
    {"transfer"},
    {"pyobjects"},
    {"sharding", "transfer/dtensors"},
    {"dispatch"},
    {"fsdp"},
    {"bindings"},
]


class Import(NamedTuple):
    """``file`` imports, or includes, ``imported``, both relative to the folder of all rooms; modules of
    Python are without their endings."""

    file: Path
    line: int
    imported: Path


def imports_to_the_right(imports: Iterable[Import], rooms: list[set[str]]) -> Iterator[str]:
    """Yields a message for each import that does not lead to the left."""
    place = {room: i for i, names in enumerate(rooms) for room in names}

    def room_of(file: Path) -> str:
        inner = "/".join(file.parts[:2])
        return inner if inner in place else file.parts[0]

    for one in imports:
        here, there = room_of(one.file), room_of(one.imported)
        for room in (here, there):
            if room not in place:
                yield f"{one.file}:{one.line}: the room {room} has no place among the rooms. Give it one."
                break
        else:
            if here != there and place[there] >= place[here]:
                yield f"{one.file}:{one.line}: {here} imports {one.imported}, which is not to the left of it."


def circles(imports: Iterable[Import]) -> Iterator[str]:
    """Yields a message for each set of files that import one another, by Tarjan's algorithm."""
    targets: dict[Path, list[Path]] = {}
    for one in imports:
        targets.setdefault(one.file, []).append(one.imported)
        targets.setdefault(one.imported, [])
    number: dict[Path, int] = {}
    lowest: dict[Path, int] = {}
    path: list[Path] = []
    found: list[list[Path]] = []

    def visit(file: Path) -> None:
        number[file] = lowest[file] = len(number)
        path.append(file)
        for target in targets[file]:
            if target not in number:
                visit(target)
            if target in path:
                lowest[file] = min(lowest[file], lowest[target])
        if lowest[file] == number[file]:
            begin = path.index(file)
            found.append(path[begin:])
            del path[begin:]

    for file in targets:
        if file not in number:
            visit(file)
    for files in found:
        if len(files) > 1:
            yield f"{', '.join(sorted(map(str, files)))}: these import one another."


class PythonFile:
    """The imports of a module of the package, and the names of other modules that it uses."""

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder = folder
        self._file = path.relative_to(folder).with_suffix("")
        self._tree = ast.parse(path.read_text(), path)
        self._modules: set[str] = set()  # names under which it has modules of the package
        self.imports: list[Import] = []
        self.private_names: list[str] = []
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom):
                self._read_from(node)
            elif isinstance(node, ast.Import):
                self._read_import(node)
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                self._read_attribute(node, node.value.id)

    def _read_import(self, node: ast.Import) -> None:
        for alias in node.names:
            parts = alias.name.split(".")
            if parts[0] == self._folder.name:
                self._add(node, Path(*parts[1:]) if len(parts) > 1 else Path("__init__"))

    def _read_from(self, node: ast.ImportFrom) -> None:
        parts = node.module.split(".") if node.module else []
        if node.level:
            package = self._file.parent.parts
            base = Path(*package[: len(package) + 1 - node.level], *parts)
        elif parts and parts[0] == self._folder.name:
            base = Path(*parts[1:])
        else:
            return
        for alias in node.names:
            module = base / alias.name
            if self._is_module(module):
                self._modules.add(alias.asname or alias.name)
                self._add(node, module)
                continue
            self._add(node, base if base.parts else Path("__init__"))
            if is_private(alias.name):
                self._refuse(node, f"{alias.name} of {base}")

    def _read_attribute(self, node: ast.Attribute, owner: str) -> None:
        if owner in self._modules and is_private(node.attr):
            self._refuse(node, f"{owner}.{node.attr}")

    def _is_module(self, module: Path) -> bool:
        path = self._folder / module
        return path.is_dir() or any(path.with_suffix(ending).exists() for ending in (".py", ".pyi"))

    def _add(self, node: ast.stmt, module: Path) -> None:
        if (self._folder / module).is_dir():
            module /= "__init__"
        if module != self._file:
            self.imports.append(Import(self._file, node.lineno, module))

    def _refuse(self, node: ast.AST, what: str) -> None:
        line = getattr(node, "lineno", 0)
        self.private_names.append(f"{self._file}:{line}: names {what}, which another module keeps to itself.")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def python_problems() -> list[str]:
    paths = [path for path in sorted(PYTHON.rglob("*.py")) if path.name != "_build_info.py"]
    files = [PythonFile(PYTHON, path) for path in paths]
    imports = [one for file in files for one in file.imports]
    return [
        *imports_to_the_right(imports, PYTHON_ROOMS),
        *circles(imports),
        *(problem for file in files for problem in file.private_names),
    ]


def cpp_problems() -> list[str]:
    includes = []
    problems = []
    for path in sorted(path for path in CPP.rglob("*") if path.suffix in (".h", ".cpp", ".cu")):
        file = path.relative_to(CPP)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if include := re.match(r'#include "(.+)"', line):
                includes.append(Import(file, number, Path(include[1])))
            if re.search(r'import(ed<|\()"funcol', line):
                problems.append(f"{file}:{number}: imports a module of funcol: have Python hand it over.")
    return [*problems, *imports_to_the_right(includes, CPP_ROOMS), *circles(includes)]


def main() -> None:
    problems = [*python_problems(), *cpp_problems()]
    print("\n".join(problems) or "No room imports what stands to its right; there is no circle.")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
