"""funcol put under DTensor and FSDP2 once a program has imported them.

Both import modules of funcol, which import DTensor: code of funcol that a program calls first imports DTensor
before such a module, or the module would be imported again while it is not complete.
"""

from __future__ import annotations

from collections.abc import Callable

from .on_import import PutOnImport
from .unknown_release import left_to_pytorch


def _start_dtensor() -> Callable[[], None]:
    with left_to_pytorch("DTensor and FSDP2"):
        from .install_dtensor import UnderDTensor

        return UnderDTensor().undo
    return lambda: None


def _start_fully_shard() -> Callable[[], None]:
    with left_to_pytorch("FSDP2"):
        from .fully_shard import UnderFullyShard

        return UnderFullyShard().undo
    return lambda: None


_under_dtensor = PutOnImport("torch.distributed.tensor", _start_dtensor)
# FSDP2 imports DTensor: its part has to wait for it before that.
_under_fully_shard = PutOnImport("torch.distributed.fsdp._fully_shard", _start_fully_shard)


def put() -> None:
    """Puts funcol under what is imported now, and else as soon as it is, until :func:`take`."""
    _under_dtensor.put()
    try:
        _under_fully_shard.put()
    except BaseException:
        _under_dtensor.take()
        raise


def take() -> None:
    remove_fully_shard()
    _under_dtensor.take()


remove_fully_shard = _under_fully_shard.take


def is_under_dtensor() -> bool:
    """Returns true if funcol is under DTensor now, which the program has imported."""
    return _under_dtensor.is_put()
