"""Means to find faults: the collectives in flight in this process (a list, a dump at a signal, their callers
and purposes), and the rank that calls something else."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.compiler import is_compiling

from .. import _C

__all__ = [
    "InFlight",
    "cancel_dump_pending_on",
    "check_agreement",
    "dump_pending",
    "dump_pending_on",
    "name_modules",
    "pending",
    "record_callers",
]

InFlight = _C.InFlight


def pending() -> list[InFlight]:
    """The collectives of this process that are in flight, the oldest first.

    Each has ``op``, ``group`` (its name), ``shapes`` and ``dtype`` of the results, ``seconds`` since its
    start, and, after :func:`~funcol.collectives.record_callers`, ``caller`` and ``purpose``; ``str()`` makes
    a line of them. Among them are collectives whose results were dropped, those that funcol's kernels started
    for PyTorch's ``_c10d_functional`` operators, and FSDP2's under :func:`funcol.install`.

    A collective is in flight until its backend says that it is over, or, where the backend cannot say so
    (gloo's sends, receives and reduce_scatter), until somebody has waited for it. Collectives that a program
    starts by ``torch.distributed`` itself are in PyTorch's flight recorder.
    """
    return _C.collectives_in_flight()


def record_callers(enabled: bool = True) -> None:
    """From now on notes for each collective which line of Python starts it, and what for.

    ``caller`` of :func:`~funcol.pending`, dumps and errors is the line, outside of PyTorch and funcol: of a
    backward pass, that of ``backward()``. ``purpose`` tells the step of a redistribution, the operator that
    needs it, the parameters of FSDP2, and, within :func:`name_modules`, the module. Takes less than a
    microsecond a collective; ``record_callers(False)`` ends it, and then it takes none.

    Purposes are also the names of collectives in profiles, whether or not callers are recorded, where
    PyTorch has such names (``torch.distributed.record_comm``, from 2.15).
    """
    folders = [str(Path(module.__file__).parent) + os.sep for module in (torch, sys.modules[_PACKAGE])]  # type: ignore[arg-type]
    _C.set_library_folders(folders)
    _C.record_callers(enabled)


_PACKAGE = __name__.partition(".")[0]


@contextlib.contextmanager
def name_modules(model: nn.Module) -> Iterator[None]:
    """While active, collectives of ``model`` have the name of the module that runs in their ``purpose``.

    Their gradients' collectives do, too. By forward hooks, which take some microseconds a module; compiled
    modules have no names.
    """
    entered = threading.local()

    def enter(name: str) -> None:
        if not is_compiling():
            names: list[str | None] = entered.__dict__.setdefault("names", [])
            names.append(_C.enter_module(name))

    def leave() -> None:
        if not is_compiling() and entered.__dict__.get("names"):
            _C.enter_module(entered.names.pop())

    def hooked(name: str, module: nn.Module) -> list[Any]:
        return [
            module.register_forward_pre_hook(lambda *_: enter(name), prepend=True),
            module.register_forward_hook(lambda *_: leave(), always_call=True),
        ]

    handles = [
        handle
        for name, module in model.named_modules()
        for handle in hooked(name or type(model).__name__, module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _File(Protocol):
    def fileno(self) -> int: ...


def dump_pending(file: Any = None) -> None:
    """Writes :func:`~funcol.pending` to ``file``, a line each; by default to stderr."""
    print(_C.in_flight_text(), end="", file=sys.stderr if file is None else file, flush=True)


def dump_pending_on(signum: int, file: _File | None = None) -> None:
    """From now on the process writes :func:`~funcol.pending` to ``file`` when it gets the signal ``signum``.

    A thread without the GIL writes, so that it also works while every thread of Python waits, as a rank does
    that hangs. The handler that was there before is called as well: ``faulthandler.register(signum,
    chain=True)`` gives stacks, too. ``file`` has ``fileno()`` and has to stay open; the default is stderr.
    Forked processes write as well. On devices it lists what nobody has waited for, since a device that hangs
    may not answer. PyTorch's counterpart is the flight recorder, Python's ``faulthandler.register``.

    ``ValueError`` for a number that is no signal, ``RuntimeError`` for one that takes no handler.
    """
    file = sys.stderr if file is None else file
    descriptor = file.fileno()
    _C.dump_in_flight_on(int(signum), descriptor)
    _files[int(signum)] = file
    if not _follows_forks:
        os.register_at_fork(after_in_child=_C.follow_fork_of_dumps)
        _follows_forks.append(True)


def cancel_dump_pending_on(signum: int) -> bool:
    """Ends :func:`dump_pending_on` for the signal; whether it was on."""
    was_on = _C.stop_dumping_in_flight_on(int(signum))
    _files.pop(int(signum), None)
    return was_on


_files: dict[int, _File] = {}  # kept open
_follows_forks: list[bool] = []


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
