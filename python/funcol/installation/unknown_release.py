"""PyTorch releases that funcol does not support: parts that do not fit such a release are left to PyTorch.

Only a build with ``FUNCOL_ANY_TORCH=1`` runs on one (``tools/next_torch``).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import _build_info

_reasons: dict[str, str] = {}


@contextmanager
def left_to_pytorch(part: str) -> Iterator[None]:
    """Suppresses the error of a block that replaces ``part`` of PyTorch, if the release is unknown."""
    try:
        yield
    except Exception as error:
        if _build_info.TORCH_IS_SUPPORTED:
            raise
        _reasons[part] = f"{type(error).__name__}: {error}"


def reasons() -> dict[str, str]:
    """Returns the parts of PyTorch that could not be replaced, and the errors."""
    return dict(_reasons)


@functools.cache
def report() -> None:
    """Prints one line of what is left to PyTorch, once in a process, if the release is unknown."""
    if _build_info.TORCH_IS_SUPPORTED:
        return
    left: list[str] = []
    with left_to_pytorch("FSDP2"):
        importlib.import_module("torch.distributed.fsdp")  # funcol comes under it
        from . import fully_shard

        left = fully_shard.taken_over()[1]
    what = f"all functions of {' and '.join(_reasons)} are" if _reasons else f"{len(left)} functions are"
    print(
        f"funcol does not know PyTorch {torch.__version__}: {what} left to PyTorch "
        "(the list: python -m funcol info)",
        file=sys.stderr,
    )
