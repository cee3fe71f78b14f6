"""Errors of wrong calls under :func:`funcol.install`, which are also instances of the type PyTorch raises.

Programs catch the errors that PyTorch raises for a call: ``AssertionError`` if a size is not divisible,
``IndexError`` for a dim that does not exist, mostly ``RuntimeError``, from its operators and backends. funcol
raises ``ValueError`` or ``TypeError``, before anything is sent. Here its errors get both types, with funcol's
message.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .. import _C


class _EitherError(AssertionError, RuntimeError):
    """An error of either type: PyTorch's type depends on its release, and on function or operator."""


# Beginnings of funcol's messages, and PyTorch's error for the same mistake, unless that is a RuntimeError.
_PYTORCH_TYPES: list[tuple[re.Pattern[str], type[Exception]]] = [
    (re.compile(r"funcol::" + words), kind)
    for words, kind in (
        (r"reduce_scatter\w*: dim \S+ has size \S+ not divisible", _EitherError),
        (r"reduce_scatter\w*: \d+ scatter dims for", AssertionError),
        (r"reduce_scatter\w*: a 0-dim tensor", IndexError),
        (r"all_to_all_single: .* Pass both, or neither", AssertionError),
        (r"all_to_all_single: pass both", AssertionError),
        (r"all_to_all_single: a 0-dim tensor", IndexError),
        (r"\w+: the group is a DeviceMesh with \d+ dims", AssertionError),
        (r"\w+: mesh dim \S+ is out of range", IndexError),
        (r"\w+: the group is a ", ValueError),
        (r"\w+: x is a DTensor", NotImplementedError),
        (r"redistribute: got a \w+ where a placement belongs", AttributeError),
        (r"distribute_tensor: \S+ on mesh axis \S+ cuts a dim that a tensor of shape \[\]", _EitherError),
        (r"distribute_tensor: \S*\(-\d+\S* on mesh axis \S+ cuts a dim", AssertionError),
        (r"distribute_tensor: \S+ on mesh axis \S+ cuts a dim", IndexError),
        (r"redistribute: \w+: \S+ shards a dim", IndexError),
        (r"redistribute: \w+: \d+ placements", IndexError),
    )
]
_FUNCOL_TYPES = (ValueError, TypeError, IndexError)


_is_installed = False


def install() -> Callable[[], None]:
    """Makes funcol's errors instances of PyTorch's types as well. Returns the function that undoes it."""
    global _is_installed
    _is_installed = True
    _C.replace_errors(_with_pytorch_type)
    return _remove


def _remove() -> None:
    global _is_installed
    _is_installed = False
    _C.replace_errors(None)


def as_raised(error: Exception) -> BaseException:
    """Returns ``error``, made in Python, as it is raised: under :func:`funcol.install` of both types."""
    return (_with_pytorch_type(error) or error) if _is_installed else error


def _with_pytorch_type(error: BaseException) -> BaseException | None:
    """Returns ``error`` with a type that is also PyTorch's; None if its type is, or if it is not funcol's."""
    if type(error) not in _FUNCOL_TYPES or not str(error).startswith("funcol"):
        return None
    message = str(error)
    known = next((kind for pattern, kind in _PYTORCH_TYPES if pattern.match(message)), RuntimeError)
    if isinstance(error, known):
        return None
    other: BaseException = _combined_type(type(error), known)(*error.args)
    return other.with_traceback(error.__traceback__)


_PACKAGE = __name__.partition(".")[0]
_combined_types: dict[tuple[Any, Any], type[BaseException]] = {}


def _combined_type(ours: type[BaseException], theirs: type[BaseException]) -> type[BaseException]:
    known = _combined_types.get((ours, theirs))
    if known is not None:
        return known

    def reduce(self: BaseException) -> tuple[Any, ...]:
        return _unpickle, (ours, theirs, self.args)

    name = ours.__name__.removesuffix("Error") + theirs.__name__.lstrip("_")
    combined = type(name, (ours, theirs), {"__module__": _PACKAGE, "__reduce__": reduce})
    return _combined_types.setdefault((ours, theirs), combined)


def _unpickle(ours: type[BaseException], theirs: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Makes an error of both types again from a pickle."""
    return _combined_type(ours, theirs)(*args)
