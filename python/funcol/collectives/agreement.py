"""Finding the rank that calls something else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from .. import _C


@contextlib.contextmanager
def check_agreement() -> Iterator[None]:
    """While active, all ranks compare their calls of funcol's collectives before anything is sent.

    Op, reduce op, dims, shapes and dtypes have to be the same on all ranks of the group (split sizes have to
    fit). If they are not, every rank raises ``torch.distributed.DistBackendError``, which names the first
    rank that differs and both calls; a rank that makes no call within the group's timeout is named by the
    others.
    Backward passes are included, compiled regions, sends and receives are not.

    For finding a fault: each call waits for all ranks. Enter it at the same point on all ranks.
    """
    _C.check_agreement(True)
    try:
        yield
    finally:
        _C.check_agreement(False)
