"""funcol installed under DTensor and FSDP2 once a program has imported them.

Both import modules of funcol, which import DTensor: code of funcol that a program calls first imports DTensor
before such a module, or the module would be imported again while it is not complete.

Under a PyTorch release that funcol does not support, parts that do not fit the release are left to PyTorch.
Only a build with ``FUNCOL_ANY_TORCH=1`` runs on one (``tools/next_torch``).
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _build_info
from ..collectives.import_hooks import InstallOnImport
from .patching import install_all

_reasons: dict[str, str] = {}


@contextmanager
def fall_back_to_pytorch(part: str) -> Iterator[None]:
    """Suppresses the error of a block that replaces ``part`` of PyTorch, if the release is unknown."""
    try:
        yield
    except Exception as error:
        if _build_info.TORCH_IS_SUPPORTED:
            raise
        _reasons[part] = f"{type(error).__name__}: {error}"


def fallback_reasons() -> dict[str, str]:
    """Returns the parts of PyTorch that could not be replaced, and the errors."""
    return dict(_reasons)


def _install_dtensor(_tensor: Any) -> Callable[[], None]:
    with fall_back_to_pytorch("DTensor and FSDP2"):
        from . import install_dtensor

        return install_dtensor.install()
    return lambda: None


def _install_fully_shard(_fully_shard: Any) -> Callable[[], None]:
    with fall_back_to_pytorch("FSDP2"):
        from . import fully_shard

        return fully_shard.install()
    return lambda: None


_dtensor_hook = InstallOnImport("torch.distributed.tensor", _install_dtensor)
# FSDP2 imports DTensor: its part has to wait for it before that.
_fully_shard_hook = InstallOnImport("torch.distributed.fsdp._fully_shard", _install_fully_shard)


def install() -> Callable[[], None]:
    """Installs funcol under the modules that are imported now, and under the others as soon as they are.
    Returns the function that undoes it."""
    return install_all((_dtensor_hook.install, _fully_shard_hook.install))


remove_fully_shard = _fully_shard_hook.remove


def is_under_dtensor() -> bool:
    """Returns true if funcol is under DTensor now, which the program has imported."""
    return _dtensor_hook.is_installed()


@functools.cache
def report_unknown_release() -> None:
    """Prints one line about what is left to PyTorch, once in a process, if the release is unknown."""
    if _build_info.TORCH_IS_SUPPORTED:
        return
    left: list[str] = []
    with fall_back_to_pytorch("FSDP2"):
        importlib.import_module("torch.distributed.fsdp")  # funcol comes under it
        from . import fully_shard

        left = fully_shard.replaced_and_unsupported()[1]
    what = f"all functions of {' and '.join(_reasons)} are" if _reasons else f"{len(left)} functions are"
    print(
        f"funcol does not know PyTorch {torch.__version__}: {what} left to PyTorch "
        "(the list: python -m funcol info)",
        file=sys.stderr,
    )
