"""Results of collectives as instances of PyTorch's ``AsyncCollectiveTensor``, under :func:`funcol.install`.

PyTorch's results are instances of that class and have its methods; funcol's are plain tensors. So pending
tensors are instances of the class to ``isinstance``, and plain tensors have its methods. Subclasses of
``torch.Tensor``, fake tensors among them, do not have the methods, and Dynamo does not see them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import ModuleType
from typing import Any

import torch.distributed._functional_collectives as stock
from torch import Tensor

from .. import _C, _compat
from ..collectives.async_tensor import wait_tensor
from ..collectives.import_hooks import after_import
from . import patching


class _Attribute:
    """An attribute that tensors of the class ``Tensor`` itself have, and tensors of subclasses do not have.

    No setter: subclasses store attributes of the same name.
    """

    def __init__(self, name: str, get: Callable[[Tensor], Any], only_results: bool) -> None:
        self._name, self._get, self._only_results = name, get, only_results

    def __get__(self, tensor: Tensor | None, owner: type | None = None) -> Any:
        if tensor is None:
            return None  # so that code that lists the methods of Tensor skips it
        if type(tensor) is not Tensor or (self._only_results and not _C.was_pending(tensor)):
            raise AttributeError(
                f"{type(tensor).__name__!r} object has no attribute {self._name!r}",
                name=self._name,
                obj=tensor,
            )
        return self._get(tensor)


# Finished results and their views cannot be distinguished from other plain tensors: all have the first two.
_ATTRIBUTES = {
    "wait": _Attribute("wait", lambda tensor: partial(wait_tensor, tensor), only_results=False),
    "trigger_wait": _Attribute(
        "trigger_wait", lambda tensor: partial(wait_tensor, tensor), only_results=False
    ),
    "completed": _Attribute("completed", lambda tensor: not _C.is_pending(tensor), only_results=True),
    "elem": _Attribute("elem", lambda tensor: tensor, only_results=True),
}

_awaits_dynamo = False


def install() -> Callable[[], None]:
    """Gives tensors the methods, and ``isinstance`` its answer. Returns the function that undoes it."""
    global _awaits_dynamo
    with ExitStack() as undo:
        for name, attribute in _ATTRIBUTES.items():
            if not hasattr(Tensor, name):
                undo.callback(patching.set_attribute(Tensor, name, attribute))
        _C.install_pending_instances(stock.AsyncCollectiveTensor)
        undo.callback(_C.remove_pending_instances)
        if not _awaits_dynamo:
            _awaits_dynamo = True
            after_import("torch._dynamo.variables.tensor", _hide_from_dynamo)
        return undo.pop_all().close


def _hide_from_dynamo(module: ModuleType) -> None:
    """Removes the attributes from those that Dynamo copies from ``Tensor`` when it is imported."""
    copied = _compat.tensor_attributes(module)
    for name, attribute in _ATTRIBUTES.items():
        if copied.get(name) is attribute:
            del copied[name]
