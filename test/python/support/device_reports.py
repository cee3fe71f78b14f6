"""Reports of a simulated GPU about the program that ran on it."""

from __future__ import annotations

import ctypes
import functools

import torch


def check_device() -> None:
    """Waits for all work of the current device; raises if the simulation reported something meanwhile."""
    reports = _reports()
    if reports:
        raise AssertionError(reports)


def forget_reports_of_older_fsdp2() -> None:
    """Leaves out what the simulation reported of a program on FSDP2, on PyTorch before 2.15.

    There a backward pass gathers parameters ahead that are not used, and nothing waits for the copies that
    read them: if the program drops its model then, their memory is reused too early. It does so
    without funcol as with it; the copies' results are not used.
    """
    if torch.__version__ < "2.15":
        _reports()


def _reports() -> str:
    torch.cuda.synchronize()
    take = _take_reports()
    return take().decode() if take is not None else ""


@functools.cache
def _take_reports() -> ctypes._NamedFuncPointer | None:
    """Returns the simulation's own function; None on a real GPU."""
    take = getattr(ctypes.CDLL(None), "simulated_gpu_take_reports", None)
    if take is not None:
        take.restype = ctypes.c_char_p
    return take
