"""Installs funcol in the place of PyTorch's functional collectives, in programs that do not name funcol.

:func:`install` does the following, and :func:`uninstall` undoes it:

- funcol's functions replace those of the same names in ``torch.distributed._functional_collectives`` and in
  every other module of PyTorch that imported them. A PyTorch function that a program holds calls funcol's.
- The operators of ``_c10d_functional``, ``_c10d_functional_autograd`` and ``c10d_functional`` get funcol's
  kernels for CPU and CUDA. Their schemas, traces and gradients stay PyTorch's.
- DTensor gets funcol's redistribution, propagation and conversions
  (:mod:`funcol.installation.install_dtensor`); FSDP2 and the package ``spmd_types`` get funcol's functions
  (:mod:`funcol.installation.fully_shard`, :mod:`funcol.installation.spmd_types`). Each gets them once a
  program imports it.
- Pending tensors are instances of PyTorch's ``AsyncCollectiveTensor`` to ``isinstance``, and have its methods
  (:mod:`funcol.installation.results`).

A compiled region that calls a replaced function is compiled once for either state, because Dynamo guards the
functions that it looked into.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, KeysView
from contextlib import ExitStack, contextmanager
from inspect import isfunction
from types import ModuleType
from typing import Any, NamedTuple

import torch.distributed._functional_collectives as stock
import torch.distributed.distributed_c10d as c10d

from .. import _C
from ..collectives import async_tensor, errors, functions, tracing
from ..compiled import remaps
from . import dtensor_on_import, kernels, patching, results, spmd_types
from .counts import decision_counts as decision_counts
from .counts import forget_decision_counts as forget_decision_counts
from .counts import forget_operator_counts as forget_operator_counts
from .counts import operator_counts as operator_counts
from .counts import table_limits as table_limits
from .dtensor_on_import import is_under_dtensor as is_under_dtensor

# funcol's public functions, by name.
_OWN_FUNCTIONS: dict[str, Any] = {
    name: function
    for module in (functions, async_tensor, tracing, remaps)
    for name, function in vars(module).items()
    if isfunction(function) and function.__module__ == module.__name__
}


class _Replacement(NamedTuple):
    name: str
    theirs: Any
    ours: Any


def _replacements() -> list[_Replacement]:
    """Returns the public functions that PyTorch's module and funcol both have, where they differ."""
    found = []
    for name, held in vars(stock).items():
        ours = _OWN_FUNCTIONS.get(name)
        if name.startswith("_") or held is ours or ours is None:
            continue
        theirs = held if patching.is_own_context(held) else patching.own_function_of(stock, name)
        if theirs is not None:
            found.append(_Replacement(name, theirs, ours))
    return found


def kept_from_programs() -> dict[str, str]:
    """Returns the functions that programs put in the place of PyTorch's, by the names of PyTorch's."""
    if _installed is not None:
        return _installed.kept
    return _kept(_replacements())


def _kept(replacements: list[_Replacement]) -> dict[str, str]:
    held = {replacement.name: vars(stock)[replacement.name] for replacement in replacements}
    return {
        name: patching.describe(held[name]) for name, theirs, _ in replacements if held[name] is not theirs
    }


def replaced_functions() -> list[str]:
    """Returns the names of the functions in PyTorch's module that :func:`funcol.install` replaces."""
    replacements = _replacements() if _installed is None else _installed.replacements
    return [replacement.name for replacement in replacements]


def _namespaces_with(ids: KeysView[int]) -> Iterator[dict[Any, Any]]:
    """Yields the dicts in which PyTorch refers to its own functions, its modules' and Dynamo's table, that
    hold an object with one of ``ids``."""
    namespaces: list[dict[Any, Any]] = [
        vars(module)
        for name, module in list(sys.modules.items())
        if (name == "torch" or name.startswith("torch.")) and isinstance(module, ModuleType)
    ]
    for namespace in (*namespaces, stock.traceable_collective_remaps):
        if not ids.isdisjoint(map(id, list(namespace.values()))):
            yield namespace


class _Installation:
    """funcol's functions and kernels, installed. :meth:`undo` restores PyTorch's, also in modules that have
    imported ours since."""

    def __init__(self) -> None:
        self.replacements = _replacements()
        self.kept = _kept(self.replacements)
        self._places: list[tuple[dict[Any, Any], Any, _Replacement]] = []
        self._by_ours: dict[int, list[_Replacement]] = {}
        for replacement in self.replacements:
            self._by_ours.setdefault(id(replacement.ours), []).append(replacement)
        with ExitStack() as undo:
            undo.callback(self._restore)
            undo.callback(kernels.install())
            self._replace({id(replacement.theirs): replacement for replacement in self.replacements})
            for part in (results, spmd_types, errors):
                undo.callback(part.install())
            for replacement in self.replacements:
                ours = replacement.ours
                if patching.is_own_context(replacement.theirs):
                    ours = ours.__wrapped__  # the redirected function is within the context
                undo.callback(patching.redirect(replacement.theirs, ours))
            self.undo = undo.pop_all().close

    def _replace(self, by_theirs: dict[int, _Replacement]) -> None:
        for namespace in _namespaces_with(by_theirs.keys()):
            for key, value in list(namespace.items()):
                replacement = by_theirs.get(id(value))
                if replacement is not None:
                    self._places.append((namespace, key, replacement))
                    namespace[key] = replacement.ours

    def _restore(self) -> None:
        for namespace, key, replacement in self._places:
            if namespace.get(key) is replacement.ours:
                namespace[key] = replacement.theirs
        for namespace in _namespaces_with(self._by_ours.keys()):
            for key, value in list(namespace.items()):
                if id(value) in self._by_ours:
                    namespace[key] = self._stock_of(value, key)

    def _stock_of(self, ours: Any, key: Any) -> Any:
        """Returns PyTorch's function that ``ours`` replaced in a module that imported it as ``key``: some
        functions have several names."""
        by_name = {replacement.name: replacement.theirs for replacement in self._by_ours[id(ours)]}
        return by_name.get(key) or by_name.get(ours.__name__) or next(iter(by_name.values()))


_lock = threading.Lock()
_installed: _Installation | None = None
_undo_dtensor: Callable[[], None] | None = None
_BY_INSTALL = object()
# The callers that want funcol, install() or open installed(): true if DTensor is wanted, too.
_wanted: dict[object, bool] = {}


def _want(caller: object, dtensor: bool) -> None:
    """Installs the parts that ``caller`` wants and that are missing; if that fails, undoes it."""
    with _lock:
        before = dict(_wanted)
        _wanted[caller] = dtensor or _wanted.get(caller, False)
        try:
            _update()
        except BaseException:
            _wanted.clear()
            _wanted.update(before)
            raise


def _update() -> None:
    """Installs the parts that are wanted now, and removes the others. The caller holds the lock."""
    global _installed, _undo_dtensor
    wants_dtensor = any(_wanted.values())
    if not wants_dtensor and _undo_dtensor is not None:
        undo, _undo_dtensor = _undo_dtensor, None
        undo()
    before = _installed
    if not _wanted:
        _remove()
    elif before is None:
        _installed = _Installation()
    if wants_dtensor and _undo_dtensor is None:
        try:
            _undo_dtensor = dtensor_on_import.install()
        except BaseException:
            if before is None:
                _remove()
            raise


def _remove() -> None:
    global _installed
    if _installed is not None:
        installation, _installed = _installed, None
        installation.undo()


def is_installed() -> bool:
    """Returns true if funcol currently replaces PyTorch's functional collectives."""
    return _installed is not None


def install(*, dtensor: bool = True) -> None:
    """Installs funcol in place of PyTorch's functional collectives, and under DTensor, for all threads, until
    :func:`uninstall`.

    Existing DTensor, tensor-parallel and FSDP2 programs, compiled ones too, then run on it and compute the
    same. ``dtensor=False`` replaces the collectives alone. A second call adds the parts that are missing.
    Starts no thread, and imports neither DTensor nor FSDP2: what a program imports later is replaced then. A
    function of PyTorch that a program imported by name before this call calls funcol's, too.

    Of DTensor, funcol replaces ``to_local``, ``from_local``, ``redistribute``, ``full_tensor``,
    ``distribute_tensor``, the dispatcher's propagator, its redistribution of arguments and wrapping of
    results, the costs of redistribution, and random numbers on CPU and CUDA meshes
    (``funcol.installation.random_operators``); of FSDP2, imported before or after this call, the work on
    parameters. A propagator of another class than PyTorch's stays in place. So does a function that a program
    put in the place of PyTorch's; if it calls PyTorch's function, that calls funcol's. If anything fails, all
    of it is undone. Under a PyTorch release that funcol does not support, parts that do not fit are left to
    PyTorch, and one line about them is printed.
    """
    _want(_BY_INSTALL, dtensor)
    if dtensor:
        dtensor_on_import.report_unknown_release()


def uninstall() -> None:
    """Undoes :func:`install`, however often that was called, and every :func:`installed` that is still open.

    PyTorch's functions and kernels are in place again; pending tensors and DTensors stay valid. Does nothing
    if funcol is not installed.
    """
    with _lock:
        _wanted.clear()
        _update()


@contextmanager
def installed(*, dtensor: bool = True) -> Iterator[None]:
    """Calls :func:`install` for a ``with`` block; contexts nest, and overlap if several threads enter them.

    The last context to end uninstalls, unless :func:`install` was called too.
    """
    me = object()
    _want(me, dtensor)
    try:
        yield
    finally:
        with _lock:
            if _wanted.pop(me, None) is not None:
                _update()


def _name_of_ranks(ranks: list[int], tag: str) -> str | None:
    group = c10d._find_pg_by_ranks_and_tag(tag, ranks)
    return None if group is None else group.group_name


_C.set_ranks_resolver(_name_of_ranks)
_C.define_missing_legacy_ops()
