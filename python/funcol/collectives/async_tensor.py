"""Pending tensors: results of collectives that may still be running."""

from __future__ import annotations

import atexit
import functools
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _C, _compat
from .tracing import are_we_tracing

__all__ = ["AsyncCollectiveTensor", "is_pending", "unwaited_collectives", "wait_tensor", "wait_tensors"]


def is_pending(tensor: Any) -> bool:
    """Returns true while ``tensor`` is the result of a collective that nothing has waited for yet.

    Any other object, and any tensor inside a compiled region, is not pending.
    """
    return not is_dynamo_compiling() and _C.is_pending(tensor)


def wait_tensor(tensor: Tensor) -> Tensor:
    """Waits for ``tensor`` and returns it; does nothing if it is a plain tensor.

    ``tensor`` may be pending, or come from PyTorch's ``_c10d_functional`` ops. On CUDA the current stream
    waits, not the host. Using a pending tensor waits by itself; this function chooses the moment.
    Raises the collective's error. PyTorch counterpart:
    ``torch.distributed._functional_collectives.wait_tensor``.
    """
    if not is_dynamo_compiling():
        waited: Tensor = _C.wait_tensor(tensor)
        if waited is not NotImplemented:
            return waited
    return torch.ops._c10d_functional.wait_tensor(tensor)  # type: ignore[no-any-return]


def wait_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """Calls :func:`wait_tensor` for each of ``tensors``, such as the results of one coalesced collective."""
    if _compat.STOCK_WAITS_FOR_LISTS and is_dynamo_compiling():
        return torch.ops._c10d_functional.wait_tensors(tensors)  # type: ignore[no-any-return]
    return [wait_tensor(tensor) for tensor in tensors]


def unwaited_collectives() -> dict[str, int]:
    """Returns the numbers of this process's collectives for which nothing has waited, by operator.

    They are pending, or their results were dropped unused, so that their success is not known. A warning at
    exit names those that are left.
    """
    return _C.unwaited_collectives()


# The exit goes on if no collective ends within this time, in seconds.
_PATIENCE_AT_EXIT = 1.0


def end_unwaited_collectives() -> None:
    """Warns, at exit, of :func:`unwaited_collectives` and gives them time to end.

    Their peers may need them, and c10d crashes if a collective ends while the process is torn down.
    """
    counts = unwaited_collectives()
    if counts:
        ops = ", ".join(f"{count} {op}" for op, count in counts.items())
        total = sum(counts.values())
        waited = (
            f"nothing ever waited for the result of 1 collective: {ops}. Whether it succeeded is not known. "
            "Use it"
            if total == 1
            else f"nothing ever waited for the results of {total} collectives: {ops}. Whether they succeeded "
            "is not known. Use each result"
        )
        warnings.warn(
            f"funcol: {waited}, or call funcol.wait_tensor on it, before the process ends.",
            stacklevel=2,
        )
    _C.wait_for_unwaited(_PATIENCE_AT_EXIT)


atexit.register(end_unwaited_collectives)


_stock_dlpack = Tensor.__dlpack__


@functools.wraps(_stock_dlpack)
def _settled_dlpack(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    _C.settle(self)
    return _stock_dlpack(self, *args, **kwargs)


def settle_before_dlpack() -> None:
    """Makes DLPack exports of pending tensors wait first, from now on.

    ``Tensor.__dlpack__(stream=...)`` makes the consumer's stream wait for the work of the current stream so
    far, and takes the tensor's memory afterwards. If that makes the current stream wait for a collective, it
    is too late for the consumer.
    """
    torch.Tensor.__dlpack__ = _settled_dlpack  # type: ignore[method-assign]


class _PendingOnly(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return is_pending(instance)


class AsyncCollectiveTensor(metaclass=_PendingOnly):
    """``isinstance(t, AsyncCollectiveTensor)`` is true exactly while ``t`` is pending.

    A pending tensor is a plain ``torch.Tensor``, so this class has no instances of its own. Its static
    functions are for code written for PyTorch's class of this name: ``AsyncCollectiveTensor.wait(t)`` where
    that had ``t.wait()``. Calling the class with a result of a ``_c10d_functional`` op gives a tensor that
    waits by itself.
    """

    def __new__(cls, elem: Tensor) -> Tensor:  # type: ignore[misc]
        return elem if is_pending(elem) else _C.pending_on_registry(elem)

    @staticmethod
    def trigger_wait(tensor: Tensor) -> Tensor:
        """Waits for ``tensor`` and returns it."""
        return wait_tensor(tensor)

    @staticmethod
    def wait(tensor: Tensor) -> Tensor:
        """Waits for ``tensor`` and returns it."""
        return wait_tensor(tensor)

    @staticmethod
    def elem(tensor: Tensor) -> Tensor:
        """Returns the tensor behind ``tensor``: itself."""
        return tensor


def maybe_wrap_tensor(self: Tensor) -> Tensor:
    """Makes ``self``, a result of a ``_c10d_functional`` op, wait by itself; waits now if traced."""
    return wait_tensor(self) if are_we_tracing() else AsyncCollectiveTensor(self)


def maybe_wrap_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """Calls :func:`maybe_wrap_tensor` for each of ``tensors``, the results of one coalesced collective."""
    if are_we_tracing():
        return wait_tensors(tensors)
    return [AsyncCollectiveTensor(tensor) for tensor in tensors]
