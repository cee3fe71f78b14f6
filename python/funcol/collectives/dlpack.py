"""Exports of pending tensors by DLPack: they wait first.

``Tensor.__dlpack__(stream=...)`` makes the consumer's stream wait for what the current stream does by then,
and takes the tensor's memory afterwards. Where that makes the current stream wait for a collective, it is too
late for the consumer. So a pending tensor waits first.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import _C

_theirs = Tensor.__dlpack__


@functools.wraps(_theirs)
def _export(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    _C.settle(self)
    return _theirs(self, *args, **kwargs)


def install() -> None:
    """For all tensors, from now on."""
    torch.Tensor.__dlpack__ = _export  # type: ignore[method-assign]
