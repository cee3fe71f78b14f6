"""Actions on modules that are not imported yet, which run once the module is imported."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _AfterImport(MetaPathFinder, Loader):
    """Runs ``action(module)`` once module ``name`` has been imported; leaves nothing behind."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action
        self._loader: Loader | None = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Runs ``action`` on module ``name``: now if it is imported, else once it is."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class InstallOnImport:
    """A part of :func:`funcol.install` that waits until a program has imported the module that it is for.

    :meth:`install` calls ``install_into(module)`` once the module ``name`` is imported, and returns
    :meth:`remove`, which calls the function that ``install_into`` returned.
    """

    def __init__(self, name: str, install_into: Callable[[Any], Callable[[], None]]) -> None:
        self._name, self._install_into = name, install_into
        self._lock = threading.RLock()
        self._is_wanted = False
        self._awaits_import = False
        self._undo: Callable[[], None] | None = None

    def install(self) -> Callable[[], None]:
        with self._lock:
            self._is_wanted = True
            if self._awaits_import:
                return self.remove
            self._awaits_import = True
        try:
            after_import(self._name, self._imported)
        except BaseException:
            self.remove()
            raise
        return self.remove

    def remove(self) -> None:
        with self._lock:
            self._is_wanted = False
            undo, self._undo = self._undo, None
            if undo is not None:
                undo()

    def is_installed(self) -> bool:
        return self._undo is not None

    def _imported(self, module: ModuleType) -> None:
        with self._lock:
            self._awaits_import = False
            if self._is_wanted and self._undo is None:
                self._undo = self._install_into(module)
