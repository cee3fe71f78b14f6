"""Gives PyTorch its kernels in a process that runs on the simulated GPU.

PyTorch imports it by itself, at the end of ``import torch``, by the entry point group ``torch.backends``. It
does nothing in a process that ``tools/simulated_gpu`` did not start.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path


def load() -> None:
    """Registers the kernels of ATen's operators, and those of the program's own that lie beside them.

    ``SIMULATED_GPU_LIBRARIES`` names the folder with ``libsimulated_gpu_aten.so`` and any number of
    ``libsimulated_gpu_kernels_*.so``, which register their kernels as they are loaded.
    """
    named = os.environ.get("SIMULATED_GPU_LIBRARIES")
    if not named:
        return
    import torch

    folder = Path(named)
    aten = ctypes.CDLL(str(folder / "libsimulated_gpu_aten.so"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that take another's place
        aten.simulated_gpu_register()
    torch.cuda._lazy_call(aten.simulated_gpu_poison_allocated_memory)
    for library in sorted(folder.glob("libsimulated_gpu_kernels_*.so")):
        ctypes.CDLL(str(library))
