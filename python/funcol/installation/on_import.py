"""Parts of :func:`funcol.install` that wait until a program has imported the module that they are for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..collectives.import_hooks import after_import


class PutOnImport:
    """:meth:`put` calls ``start(module)`` once the module ``name`` is imported, and returns :meth:`take`,
    which calls the function that ``start`` returned."""

    def __init__(self, name: str, start: Callable[[Any], Callable[[], None]]) -> None:
        self._name, self._start = name, start
        self._lock = threading.RLock()
        self._is_wanted = False
        self._awaits_import = False
        self._undo: Callable[[], None] | None = None

    def put(self) -> Callable[[], None]:
        with self._lock:
            self._is_wanted = True
            if self._awaits_import:
                return self.take
            self._awaits_import = True
        try:
            after_import(self._name, self._imported)
        except BaseException:
            self.take()
            raise
        return self.take

    def take(self) -> None:
        with self._lock:
            self._is_wanted = False
            undo, self._undo = self._undo, None
            if undo is not None:
                undo()

    def is_put(self) -> bool:
        return self._undo is not None

    def _imported(self, module: ModuleType) -> None:
        with self._lock:
            self._awaits_import = False
            if self._is_wanted and self._undo is None:
                self._undo = self._start(module)
