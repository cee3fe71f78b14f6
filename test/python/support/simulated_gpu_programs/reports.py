"""Reports of the simulated GPU in this process."""

from __future__ import annotations

import ctypes


def take_reports() -> str:
    """Returns the reports since the last call; they count no more."""
    runtime = ctypes.CDLL("libcudart.so.13")  # the one that is loaded
    runtime.simulated_gpu_take_reports.restype = ctypes.c_char_p
    return str(runtime.simulated_gpu_take_reports().decode())
