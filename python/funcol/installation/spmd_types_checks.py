"""funcol in the type checker of ``spmd_types``: its results, remembered by call.

The checker is a torch function mode that infers types in Python at every call. C++ keeps its results (see
csrc/pyobjects/checked_types.h), and runs it for a call that is not equal to an earlier one. No call that it
would refuse passes, since only calls that it accepted are kept.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .. import _C
from . import patching

_checker: Any = importlib.import_module("spmd_types._checker")
_runtime: Any = importlib.import_module("spmd_types.runtime")
_state: Any = importlib.import_module("spmd_types._state")

# As C++ numbers them.
_UNCHECKED, _REMEMBERED, _CHECKED = 0, 1, 2

# In newer versions, the functions that are not checked, and what observes assertions.
_unchecked_codes: Any = getattr(_state, "_NO_TYPECHECK_CODES", ())
_coverage: Callable[[], Any] = bool
if hasattr(_runtime, "_mark_asserted"):
    _coverage = importlib.import_module("spmd_types._coverage")._cov


def kind_of(function: Any) -> int:
    """Returns how a call of ``function`` is checked: not at all, like an equal call before, or each time."""
    if function in _checker._PASSTHROUGH:
        return _UNCHECKED
    if function is torch.Tensor.backward or function in _checker.RAW_DIST_RULES:
        return _CHECKED
    if function in _checker._SPMD_FUNCTION_DEFAULTS:
        return _REMEMBERED
    if isinstance(function, FunctionType):
        module = function.__module__ or ""
        is_pytorchs = module.startswith("torch.") and not module.startswith("torch.distributed")
        return _REMEMBERED if is_pytorchs and not function.__closure__ else _CHECKED
    if isinstance(function, (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)):
        return _CHECKED if function.__name__ == "apply" else _REMEMBERED
    return _CHECKED


class _FinishedCall:
    """A replacement for a function whose call has run already: it returns that call's result once."""

    def __init__(self, function: Any, result: Any) -> None:
        self._function, self._result = function, [result]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._result.pop() if self._result else self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._function == other)

    def __hash__(self) -> int:
        return hash(self._function)


_numbers: dict[Hashable, int] = {}


def _number_of_mesh(entry: Any) -> int:
    """Returns a number for the value of an entry of the stack of meshes."""
    value = (
        entry.axes,
        entry.local_axes,
        frozenset(entry.names.items()),
        frozenset(entry.all_names.items()),
    )
    return _numbers.setdefault(value, len(_numbers) + 1)


def check(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Replaces ``_SpmdTypeMode.__torch_function__``."""
    if is_dynamo_compiling() or _unchecked_codes:
        return NotImplemented
    return _C.check_types(self, func, types, args, kwargs)


def install() -> Callable[[], None]:
    """Replaces the checker's functions. Returns the function that restores them."""
    if _checker._TRACE:  # each check writes a line
        return lambda: None
    mode = _checker._SpmdTypeMode
    theirs = mode.__torch_function__
    assertion = getattr(_runtime.assert_type, "__wrapped__", _runtime.assert_type)
    own_check, own_assertion = patching.copy_function(theirs), patching.copy_function(assertion)

    def assert_type(tensor: Any, *args: Any, **options: Any) -> Any:
        if is_dynamo_compiling() or _runtime._TRACE or _coverage():
            return NotImplemented
        return _C.assert_type(own_assertion, tensor, args, options)

    def recheck(mode: Any, function: Any, types: Any, args: Any, kwargs: Any, result: Any) -> Any:
        return own_check(mode, _FinishedCall(function, result), types, args, kwargs)

    registered = _checker._OP_REGISTRY
    getters = {found.__self__ for found in registered if getattr(found, "__name__", "") == "__get__"}
    with ExitStack() as undo:
        _C.set_type_checker(mode, own_check, recheck, kind_of, getters, _state._tls, _number_of_mesh)
        undo.callback(_C.set_type_checker)
        undo.callback(patching.replace(theirs, check))
        undo.callback(patching.replace(assertion, assert_type))
        return undo.pop_all().close
