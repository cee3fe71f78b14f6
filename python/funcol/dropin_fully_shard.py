"""When funcol comes under FSDP2, which programs without it are not made to import."""

from __future__ import annotations

import threading
from types import ModuleType
from typing import TYPE_CHECKING

from . import _compat

if TYPE_CHECKING:
    from .fully_shard import UnderFullyShard

_lock = threading.RLock()
_is_wanted = False
_awaits_import = False
_under_fully_shard: UnderFullyShard | None = None


def put() -> None:
    """Puts funcol under FSDP2, as soon as somebody has imported that."""
    global _is_wanted, _awaits_import
    with _lock:
        _is_wanted = True
        if _awaits_import:
            return
        _awaits_import = True
    try:
        _compat.after_import("torch.distributed.fsdp._fully_shard", _update)
    except BaseException:
        take()
        raise


def take() -> None:
    global _is_wanted
    with _lock:
        _is_wanted = False
        _update(None)


def _update(_module: ModuleType | None) -> None:
    global _under_fully_shard, _awaits_import
    with _lock:
        if _module is not None:
            _awaits_import = False
        if _is_wanted and _under_fully_shard is None:
            from .fully_shard import UnderFullyShard

            _under_fully_shard = UnderFullyShard()
        elif not _is_wanted and _under_fully_shard is not None:
            parts, _under_fully_shard = _under_fully_shard, None
            parts.undo()
