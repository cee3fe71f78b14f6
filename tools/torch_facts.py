"""Collects, as JSON, what a PyTorch has of all that funcol relies on.

    python tools/torch_facts.py [FACTS]

FACTS is the JSON of another PyTorch, whose functions are looked up in this one. Needs no build of funcol:
funcol's modules are imported with a stub of its C++. A part that cannot be collected is an entry of "errors".
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "funcol"
NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")


class _Anything:
    """A stub for any object of funcol's C++."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> _Anything:
        return self

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _StubModule(ModuleType):
    """A stub for ``funcol._C``. Its attributes are classes: modules of funcol call and inherit from them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (_Anything,), {}))
        return vars(self)[name]


def use_stubs() -> None:
    """Makes funcol's modules importable without a build. ``funcol/__init__.py`` itself does not run."""
    package = ModuleType("funcol")
    package.__path__ = [str(PACKAGE)]
    info = ModuleType("funcol._build_info")
    vars(info)["TORCH_IS_SUPPORTED"] = True
    sys.modules.update({"funcol": package, "funcol._C": _StubModule("funcol._C"), "funcol._build_info": info})


def version() -> str:
    import torch

    return str(torch.__version__)


def dispatch_keys() -> list[str]:
    """Returns the names of all dispatch keys, in the order of the enumeration."""
    import torch

    include = Path(torch.__file__).parent / "include"
    for header in sorted(include.rglob("DispatchKey.h")):
        found = re.search(r"enum class DispatchKey[^{]*\{(.*?)\n\};", header.read_text(), re.DOTALL)
        if found is not None:
            body = re.sub(r"//.*|/\*.*?\*/|#.*", "", found[1])
            return re.findall(r"^\s*(\w+)\s*(?:=|,|$)", body, re.MULTILINE)
    raise LookupError(f"no header below {include} has the enumeration DispatchKey")


def wake_key() -> dict[str, Any]:
    """Returns the dispatch key of ``csrc/async/wake_key.h``, and what PyTorch itself registers for it."""
    import torch

    header = (ROOT / "csrc" / "async" / "wake_key.h").read_text()
    name = re.findall(r"kWakeKey = c10::DispatchKey::(\w+)", header)[0]
    return {
        "name": name,
        "has_fallback": torch._C._dispatch_has_backend_fallback(name),
        "kernels": torch._C._dispatch_get_registrations_for_dispatch_key(name),
    }


def schemas() -> dict[str, str]:
    """Returns the schemas of the functional collectives' operators, by qualified name."""
    import torch
    import torch.distributed._functional_collectives

    names = [name for name in torch._C._dispatch_get_all_op_names() if name.split("::")[0] in NAMESPACES]
    found = [
        schema for name in names for schema in torch._C._jit_get_schemas_for_operator(name.split(".")[0])
    ]
    return {schema.name: str(schema) for schema in sorted(found, key=str)}


def members() -> dict[str, list[str]]:
    """Returns the members of the classes of c10d that C++ calls."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import Backend

    return {"ProcessGroup": dir(dist.ProcessGroup), "Backend": dir(Backend)}


def collectives() -> list[str]:
    """Returns the public functions of PyTorch's module of functional collectives."""
    import torch.distributed._functional_collectives as stock

    return [
        name
        for name, found in vars(stock).items()
        if not name.startswith("_")
        and getattr(found, "__module__", None) == stock.__name__
        and callable(found)
    ]


def missing_imports() -> dict[str, list[str]]:
    """Returns the names that funcol imports and this PyTorch lacks, with the places of the imports."""
    missing: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for name in _imported(node):
                if not _exists(name):
                    missing.setdefault(name, []).append(f"{file.relative_to(ROOT)}:{node.lineno}")
    return missing


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch":
        return [f"{node.module}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
    return []


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        if module and hasattr(importlib.import_module(module), attribute):
            return True
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def functions(wanted: list[str]) -> dict[str, str | None]:
    """Returns digests of the sources of functions ``module:qualified name``; ``None`` for a missing function.

    Without ``wanted`` the functions are those that ``funcol.install()`` replaces, FSDP2's left out.
    """
    from funcol.installation import patching

    def looked_up(name: str) -> Any:
        module, _, path = name.partition(":")
        try:
            return patching.find_function(importlib.import_module(module), path)
        except ImportError:
            return None

    found = {name: inspect.unwrap(looked_up(name) or str) for name in wanted or _replaced()}
    return {
        name: patching.digest_of(function.__code__) if hasattr(function, "__code__") else None
        for name, function in found.items()
    }


def _replaced() -> list[str]:
    from funcol import installation
    from funcol.installation import install_dtensor, patching

    theirs = [replacement.theirs for replacement in installation._replacements()]
    theirs += [function for function, _ in install_dtensor._FUNCTIONS]
    own = [patching.own_function(function) for function in theirs]
    return [f"{function.__module__}:{function.__qualname__}" for function in own if function is not None]


def fsdp2() -> dict[str, list[str]]:
    """Returns FSDP2's functions that ``funcol.install()`` replaces, and those that it leaves to PyTorch, with
    the reasons: functions of unknown source, replaced or bypassed by a replacement, and missing ones."""
    from funcol.installation import fully_shard
    from funcol.installation.fully_shard_table import FUNCTIONS

    replaced, left = fully_shard.replaced_and_unsupported()
    unknown = [name for name in FUNCTIONS if not fully_shard._is_known(name)]
    missing = [name for name in unknown if fully_shard.find_decorated(name) is None]
    return {
        "replaced": replaced,
        "left": left,
        "unknown": [name for name in unknown if name not in missing],
        "missing": missing,
    }


def collect(wanted: list[str]) -> dict[str, Any]:
    """Returns all facts, by the names of the functions above."""
    own = (version, dispatch_keys, wake_key, schemas, members, collectives, missing_imports, fsdp2)
    parts: dict[str, Callable[[], Any]] = {part.__name__: part for part in own}
    parts["functions"] = partial(functions, wanted)
    facts: dict[str, Any] = {"errors": {}}
    for name, part in parts.items():
        try:
            facts[name] = part()
        except Exception as error:  # an unknown PyTorch may raise anything
            facts["errors"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return facts


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    use_stubs()
    known = json.loads(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else {}
    print(json.dumps(collect(list(known.get("functions", {})))), flush=True)
    os._exit(0)  # funcol's actions at exit need its C++
