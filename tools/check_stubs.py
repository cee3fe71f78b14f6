"""Compares the stubs of ``funcol._C`` with the built module: names, parameters, defaults and types.

    python tools/check_stubs.py

Stubs hold types and docstrings that bindings cannot express (``Callable``, ``tuple[int, ...]``), so they
are written by hand. A binding's own signature is the first line of its docstring, made by pybind11;
functions that take an array of arguments have none, but their error for too many names the right number.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

STUBS = Path(__file__).resolve().parent.parent / "python" / "funcol" / "_C"
# More arguments than any function takes. Every call with as many is rejected before it does anything.
TOO_MANY = 50
UNKNOWN = {"Any", "object"}
EQUAL_TYPES = {"SupportsInt": "int", "SupportsFloat": "float", "Sequence": "list"}


def stub_members(folder: Path = STUBS) -> dict[str, list[ast.stmt]]:
    """Returns the definitions of all stubs by name, members as ``Class.name``; overloads in order."""
    found: dict[str, list[ast.stmt]] = {}

    def add(statements: list[ast.stmt], prefix: str) -> None:
        for statement in statements:
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                found.setdefault(prefix + statement.name, []).append(statement)
            elif isinstance(statement, ast.AnnAssign):
                found.setdefault(prefix + ast.unparse(statement.target), []).append(statement)
            if isinstance(statement, ast.ClassDef):
                add(statement.body, f"{statement.name}.")

    for path in sorted(folder.glob("*.pyi")):
        add(ast.parse(path.read_text()).body, "")
    return found


def module_members(module: ModuleType) -> dict[str, Any]:
    """Returns the members of the module and of its classes, named as in :func:`stub_members`."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        found[name] = value
        if isinstance(value, type):
            members = vars(value).items()
            found.update({f"{name}.{of}": member for of, member in members if not of.startswith("_")})
            if str(value.__init__.__doc__).startswith("__init__("):
                found[f"{name}.__init__"] = value.__init__
    return found


def types_in(annotation: ast.expr | None) -> set[str]:
    """Returns the names of the types in a union, without their modules and arguments; empty if unknown."""
    if annotation is None:
        return set()
    if isinstance(annotation, ast.BinOp):
        sides = types_in(annotation.left), types_in(annotation.right)
        return sides[0] | sides[1] if all(sides) else set()
    if isinstance(annotation, ast.Subscript):
        name = ast.unparse(annotation.value).rpartition(".")[2]
        return {"str"} if name == "Literal" else {EQUAL_TYPES.get(name, name)}
    name = ast.unparse(annotation).rpartition(".")[2]
    return set() if name in UNKNOWN else {EQUAL_TYPES.get(name, name)}


def parameters(function: ast.FunctionDef) -> dict[str, ast.arg]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg: argument for argument in every if argument.arg != "self"}


def defaults(function: ast.FunctionDef) -> list[str]:
    return [ast.unparse(value) for value in function.args.defaults]


def expected_count(function: Any) -> int:
    """Returns the number of arguments of a function that has no docstring."""
    text = ""
    try:
        function(*[None] * TOO_MANY)
    except TypeError as error:
        text = str(error)
    if "takes no arguments" in text:
        return 0
    if "takes exactly one argument" in text:
        return 1
    found = re.search(r"expected (\d+)", text)
    if found is None:
        raise RuntimeError(f"check_stubs: {function.__name__} does not name a number of arguments: {text}")
    return int(found[1])


def signature(text: str) -> ast.FunctionDef:
    """Parses the signature that pybind11 writes into the first line of a docstring."""
    # Ints and floats are SupportsInt | SupportsIndex and SupportsFloat | SupportsIndex.
    line = text.split("\n", 1)[0].replace(" | typing.SupportsIndex", "")
    # A default without a literal, such as <Kind.A: 0>.
    line = re.sub(r"= <[^>]*>", "= ...", line)
    [parsed] = ast.parse(f"def {line if line[0] != '(' else 'get' + line}: ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return parsed


def signature_differences(stub: ast.FunctionDef, binding: ast.FunctionDef) -> Iterator[str]:
    ours, theirs = parameters(stub), parameters(binding)
    is_named = not any(re.fullmatch(r"arg\d+", name) for name in theirs)
    if is_named and list(ours) != list(theirs):
        yield f"parameters {list(ours)}, the binding has {list(theirs)}"
        return
    if len(ours) != len(theirs):
        yield f"{len(ours)} parameters, the binding has {len(theirs)}"
        return
    if theirs and is_named == bool(stub.args.posonlyargs):
        yield "parameters are positional only" if is_named else "parameters have no names: end them with '/'"
    if defaults(stub) != defaults(binding):
        yield f"defaults {defaults(stub)}, the binding has {defaults(binding)}"
    for (name, our), their in zip(ours.items(), theirs.values(), strict=True):
        accepted = types_in(their.annotation)
        if accepted and not types_in(our.annotation) <= accepted:
            yield f"{name} is {types_in(our.annotation)}, the binding takes {accepted}"
    yield from return_differences(stub, binding)


def return_differences(stub: ast.FunctionDef, binding: ast.FunctionDef) -> Iterator[str]:
    returned = types_in(stub.returns)
    if returned and not types_in(binding.returns) <= returned:
        yield f"returns {returned}, the binding {types_in(binding.returns)}"


def member_differences(stub: ast.stmt, member: Any) -> Iterator[str]:
    """Compares one definition of a stub with the member of the module."""
    if isinstance(stub, ast.ClassDef):
        bases = [base.__name__ for base in getattr(member, "__bases__", ())]
        expected = [ast.unparse(base) for base in stub.bases] or ["pybind11_object"]
        if bases != expected:
            yield f"a class with bases {expected}, the binding has {bases}"
    elif isinstance(stub, ast.AnnAssign):
        if types_in(stub.annotation) != {type(member).__name__}:
            yield f"is {ast.unparse(stub.annotation)}, the binding is {type(member).__name__}"
    elif isinstance(stub, ast.FunctionDef):
        is_property = any(ast.unparse(one) == "property" for one in stub.decorator_list)
        if is_property != isinstance(member, property):
            yield f"is {'a' if is_property else 'no'} property, unlike the binding"
            return
        if isinstance(member, property):
            yield from return_differences(stub, signature(str(member.fget.__doc__)))
        elif member.__doc__:
            yield from signature_differences(stub, signature(member.__doc__))
        elif stub.args.vararg is None:
            expected = expected_count(member)
            if expected != len(parameters(stub)):
                yield f"{len(parameters(stub))} parameters, the binding takes {expected}"
            if expected and not stub.args.posonlyargs:
                yield "the binding takes arguments by position alone: end them with '/'"


def differences(stubs: dict[str, list[ast.stmt]], members: dict[str, Any]) -> list[str]:
    """Returns a line for each name that a stub or the module lacks, or that they define differently."""
    found = [f"{name} has no stub" for name in members.keys() - stubs.keys()]
    for name, definitions in stubs.items():
        owner, _, last = name.rpartition(".")
        if last.startswith("_") and last != "__init__" and name not in members:
            continue  # added to the class by Python
        if name not in members:
            found.append(f"{name} has a stub, but {owner or 'the module'} does not have it")
            continue
        for definition in definitions:
            found.extend(f"{name}: {line}" for line in member_differences(definition, members[name]))
    return sorted(found)


def main() -> None:
    from funcol import _C

    found = differences(stub_members(), module_members(_C))
    print("\n".join(found) or "The stubs of funcol._C agree with the built module.")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
