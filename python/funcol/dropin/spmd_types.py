"""funcol in the place of the collectives of ``spmd_types``, a package of types for plain tensors.

:func:`funcol.install` puts it there, as soon as somebody has imported the package.

Its functions stay the same objects, so that its type checker knows them; what they call is in
:mod:`funcol.dropin.spmd_types_calls`. Of a version whose source funcol was not made for nothing is replaced:
it runs as it is, on PyTorch's functional collectives, which are funcol's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from . import patching
from .put_on_import import PutOnImport

# Digests of the sources of the modules that the functions, and what they would have called, are in.
_KNOWN = {
    "spmd_types._collectives": {"81d6292a", "26141783"},
    "spmd_types._local": {"79ebb5f3", "2ce0b11d"},
    "spmd_types._dtype_utils": {"a9a50b37", "2e091ec0"},
}


_replaced: list[str] = []


def replaced_functions() -> list[str]:
    """Names of the package's functions that funcol is in the place of."""
    return list(_replaced)


def known_version() -> tuple[str, bool] | None:
    """The version that is there to be imported, and whether funcol takes it over; None if there is none."""
    found = importlib.util.find_spec("spmd_types")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    files = {name: folder / f"{name.split('.')[1]}.py" for name in _KNOWN}
    is_known = all(file.exists() and digest(file) in _KNOWN[name] for name, file in files.items())
    return importlib.metadata.version("spmd_types"), is_known


def _start() -> Callable[[], None]:
    if not all(map(_is_known, _KNOWN)):
        return lambda: None
    from . import spmd_types_calls as calls

    put_back: list[Callable[[], None]] = []

    def undo() -> None:
        _replaced.clear()
        while put_back:
            put_back.pop()()

    try:
        for module, name, ours in calls.REPLACED:
            theirs = _own_function(sys.modules[module], name)
            if theirs is not None:
                calls.stock[name] = patching.copied(theirs)
                put_back.append(patching.redirected_of_package(theirs, ours))
                _replaced.append(name)
    except BaseException:
        undo()
        raise
    return undo


_under_spmd_types = PutOnImport("spmd_types._collectives", _start)
put, take = _under_spmd_types.put, _under_spmd_types.take


def _is_known(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    try:
        return file is not None and digest(Path(file)) in _KNOWN[name]
    except OSError:
        return False


def digest(file: Path) -> str:
    """Of a module's source."""
    return f"{zlib.crc32(file.read_bytes()):08x}"


def _own_function(module: ModuleType, name: str) -> Any:
    """The package's own function, without the wrapper that filters its tracebacks; None if a program has put
    something in its place."""
    found = vars(module).get(name)
    if isinstance(found, FunctionType) and found.__module__ == module.__name__:
        found = vars(found).get("__wrapped__", found)
        if isinstance(found, FunctionType) and found.__code__.co_filename == module.__file__:
            return None if found.__code__.co_freevars else found
    return None
