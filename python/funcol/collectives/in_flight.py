"""Debugging aids: the collectives in flight in this process (a list, a dump at a signal, their callers and
purposes), and the rank whose call differs."""

from __future__ import annotations

import contextlib
import functools
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
    """Returns the collectives of this process that are in flight, the oldest first.

    Each has ``op``, ``group`` (its name), ``shapes`` and ``dtype`` of the results, ``seconds`` since its
    start, and, after :func:`~funcol.collectives.record_callers`, ``caller`` and ``purpose``; ``str()`` makes
    a line of them. The list includes collectives whose results were dropped, those that funcol's kernels
    started for PyTorch's ``_c10d_functional`` operators, and FSDP2's under :func:`funcol.install`.

    A collective is in flight until its backend reports that it has completed or, if the backend cannot report
    it (gloo's sends, receives and reduce_scatter), until it has been waited for. Collectives that a program
    starts through ``torch.distributed`` itself are in PyTorch's flight recorder.
    """
    return _C.collectives_in_flight()


def record_callers(enabled: bool = True) -> None:
    """Records, from now on, the line of Python that starts each collective, and its purpose.

    ``caller`` in :func:`~funcol.pending`, dumps and errors is that line, outside of PyTorch and funcol; for a
    backward pass, the line of ``backward()``. ``purpose`` names the step of a redistribution, the operator
    that needs it, the parameters of FSDP2, and, within :func:`name_modules`, the module. Recording takes less
    than a microsecond for each collective; ``record_callers(False)`` ends it and its cost.

    Purposes are also the names of collectives in profiles, whether or not callers are recorded, where
    PyTorch has such names (``torch.distributed.record_comm``, from 2.15).
    """
    folders = [str(Path(module.__file__).parent) + os.sep for module in (torch, sys.modules[_PACKAGE])]  # type: ignore[arg-type]
    _C.set_library_folders(folders)
    _C.record_callers(enabled)


_PACKAGE = __name__.partition(".")[0]


@contextlib.contextmanager
def name_modules(model: nn.Module) -> Iterator[None]:
    """Adds the name of the running module to the ``purpose`` of ``model``'s collectives, while active.

    Collectives of the gradients get it, too. Forward hooks do so, which take some microseconds for each
    module; compiled modules have no names.
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
    """Makes the process write :func:`~funcol.pending` to ``file`` when it gets the signal ``signum``.

    A thread without the GIL writes, so that it also works while every thread of Python waits, as in a rank
    that hangs. The previous handler is called as well: ``faulthandler.register(signum, chain=True)`` gives
    stacks, too. ``file`` has ``fileno()`` and has to stay open; the default is stderr. Forked processes write
    as well. On devices it lists the collectives that have not been waited for, since a device that hangs may
    not answer. PyTorch's counterpart is the flight recorder, Python's ``faulthandler.register``.

    Raises ``ValueError`` for a number that is not a signal, ``RuntimeError`` for one that takes no handler.
    """
    file = sys.stderr if file is None else file
    descriptor = file.fileno()
    _C.dump_in_flight_on(int(signum), descriptor)
    _files[int(signum)] = file
    _follow_forks()


def cancel_dump_pending_on(signum: int) -> bool:
    """Ends :func:`dump_pending_on` for the signal. Returns true if it was on."""
    was_on = _C.stop_dumping_in_flight_on(int(signum))
    _files.pop(int(signum), None)
    return was_on


_files: dict[int, _File] = {}  # kept open


@functools.cache
def _follow_forks() -> None:
    os.register_at_fork(after_in_child=_C.follow_fork_of_dumps)


@contextlib.contextmanager
def check_agreement() -> Iterator[None]:
    """Makes all ranks compare, while active, their calls of funcol's collectives before anything is sent.

    Op, reduce op, dims, shapes and dtypes have to be equal on all ranks of the group (split sizes have to
    fit). Otherwise every rank raises ``torch.distributed.DistBackendError``, which names the first rank that
    differs and both calls. If a rank makes no call within the group's timeout, the others name it. Backward
    passes are included; compiled regions, sends and receives are not.

    Use it to find a fault, since each call waits for all ranks. Enter it at the same point on all ranks.
    """
    _C.check_agreement(True)
    try:
        yield
    finally:
        _C.check_agreement(False)
