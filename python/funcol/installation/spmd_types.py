"""funcol in the place of the collectives of ``spmd_types``, a package of types for plain tensors.

:func:`funcol.install` replaces the package's functions once a program has imported the package. They stay the
same objects, so that the package's type checker knows them; :mod:`funcol.installation.spmd_types_calls` has
the replacements. A version whose source funcol was not written for runs as it is, on PyTorch's functional
collectives, which are funcol's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ..collectives.import_hooks import InstallOnImport
from . import patching

# Digests of the modules that have the replaced functions, and the functions that the replacements bypass.
_KNOWN = {
    "spmd_types._collectives": {"81d6292a", "26141783"},
    "spmd_types._local": {"79ebb5f3", "2ce0b11d"},
    "spmd_types._dtype_utils": {"a9a50b37", "2e091ec0"},
}

# Digests of the modules of the type checker.
_KNOWN_CHECKER = {
    "spmd_types._checker": {"fb74c824", "108396bc"},
    "spmd_types.runtime": {"3644d6fc", "f1c51d49"},
    "spmd_types._state": {"c3e8ab42", "34d32a8b"},
    "spmd_types._type_attr": {"fb21208b"},
}


_replaced: list[str] = []


def replaced_functions() -> list[str]:
    """Returns the names of the package's functions that funcol replaces now."""
    return list(_replaced)


def _is_known(known: Mapping[str, set[str]], files: Mapping[str, str | None]) -> bool:
    """Returns true if the files of all modules of ``known`` have sources that funcol was written for."""
    try:
        return all(
            (file := files[name]) is not None and patching.digest_of_file(Path(file)) in digests
            for name, digests in known.items()
        )
    except OSError:
        return False


def _is_imported_known(known: Mapping[str, set[str]]) -> bool:
    return _is_known(known, {name: getattr(sys.modules.get(name), "__file__", None) for name in known})


def known_version() -> tuple[str, bool] | None:
    """Returns the version of the installed package, and whether funcol replaces its functions; ``None`` if
    the package is not installed."""
    found = importlib.util.find_spec("spmd_types")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent
    files = {name: str(folder / f"{name.split('.')[1]}.py") for name in _KNOWN}
    return importlib.metadata.version("spmd_types"), _is_known(_KNOWN, files)


def _install_collectives(_collectives: Any) -> Callable[[], None]:
    if not _is_imported_known(_KNOWN):
        return lambda: None
    from . import spmd_types_calls as calls

    with ExitStack() as undo:
        undo.callback(_replaced.clear)
        for module, name, ours in calls.REPLACED:
            theirs = _own_function(sys.modules[module], name)
            if theirs is not None:
                undo.callback(patching.replace(theirs, ours))
                _replaced.append(name)
        return undo.pop_all().close


def _install_checks(_checker: Any) -> Callable[[], None]:
    if not _is_imported_known(_KNOWN_CHECKER):
        return lambda: None
    from . import spmd_types_checks

    return spmd_types_checks.install()


_collectives_hook = InstallOnImport("spmd_types._collectives", _install_collectives)
_checker_hook = InstallOnImport("spmd_types._checker", _install_checks)


def install() -> Callable[[], None]:
    return patching.install_all((_collectives_hook.install, _checker_hook.install))


def _own_function(module: ModuleType, name: str) -> Any:
    """Returns the package's own function, without the wrapper that filters its tracebacks; ``None`` if a
    program has replaced it."""
    found = vars(module).get(name)
    if isinstance(found, FunctionType) and found.__module__ == module.__name__:
        found = vars(found).get("__wrapped__", found)
        if isinstance(found, FunctionType) and found.__code__.co_filename == module.__file__:
            return None if found.__code__.co_freevars else found
    return None
