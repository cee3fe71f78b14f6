"""funcol put under DTensor and FSDP2 once a program has imported them.

Both import modules of funcol, which import DTensor: code of funcol that a program calls first imports DTensor
before such a module, or the module would be imported again while it is not complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .on_import import PutOnImport
from .patching import put_all
from .unknown_release import left_to_pytorch


def _start_dtensor(_tensor: Any) -> Callable[[], None]:
    with left_to_pytorch("DTensor and FSDP2"):
        from . import install_dtensor

        return install_dtensor.put()
    return lambda: None


def _start_fully_shard(_fully_shard: Any) -> Callable[[], None]:
    with left_to_pytorch("FSDP2"):
        from . import fully_shard

        return fully_shard.put()
    return lambda: None


_under_dtensor = PutOnImport("torch.distributed.tensor", _start_dtensor)
# FSDP2 imports DTensor: its part has to wait for it before that.
_under_fully_shard = PutOnImport("torch.distributed.fsdp._fully_shard", _start_fully_shard)


def put() -> Callable[[], None]:
    """Puts funcol under what is imported now, and else as soon as it is. Returns the function that undoes
    it."""
    return put_all((_under_dtensor.put, _under_fully_shard.put))


remove_fully_shard = _under_fully_shard.take


def is_under_dtensor() -> bool:
    """Returns true if funcol is under DTensor now, which the program has imported."""
    return _under_dtensor.is_put()
