"""Helpers for tests of collectives in flight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

import funcol


@contextmanager
def recording() -> Iterator[None]:
    funcol.collectives.record_callers()
    try:
        yield
    finally:
        funcol.collectives.record_callers(False)


def in_flight(op: str) -> list[funcol.collectives.InFlight]:
    return [one for one in funcol.pending() if one.op == op]


@contextmanager
def peer_that_comes_late(rank: int) -> Iterator[bool]:
    """Within it rank 0 is alone; the others come to its collectives once it has left."""
    store = dist.distributed_c10d._get_default_store()
    key = f"rank 0 has looked {next(_times)}"
    if rank == 0:
        yield True
        store.set(key, "")
    else:
        store.wait([key])
        yield False


_times = itertools.count()
