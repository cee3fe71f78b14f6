"""Processes of their own: fresh interpreters, their ends, and the memory of this one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def resident_bytes() -> int:
    """Resident memory of this process without that of files, such as code that runs for the first time."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


class _MallInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int:
    """Returns the bytes that malloc has allocated and not freed, by all threads."""
    of_libc = ctypes.CDLL(None)
    of_libc.mallinfo2.restype = _MallInfo
    info = of_libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def run_python(*arguments: str) -> str:
    """Runs a fresh interpreter and returns its output."""
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_process(code: str, *args: str) -> subprocess.Popen[str]:
    """Starts a process for ``code``, which may deadlock, die, or speak at exit. ``end_of`` ends its input."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end_of(process: subprocess.Popen[str], timeout: float = 60) -> tuple[str, str]:
    """Returns the output and errors of the process; raises if it fails or takes over ``timeout`` s."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out, err


def comes_true(condition: Callable[[], bool]) -> bool:
    """Waits until ``condition`` holds, since gloo's threads release objects late; False after 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
