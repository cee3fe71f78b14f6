"""State of PyTorch that install() may change: attributes of modules, kernels of operators."""

from __future__ import annotations

import sys
from types import ModuleType

import torch


def attributes_of_torch() -> dict[tuple[str, str], int]:
    """Identity of every attribute of every module of PyTorch."""
    return {
        (name, attribute): id(value)
        for name, module in sorted(sys.modules.items())
        if isinstance(module, ModuleType) and name.split(".")[0] == "torch"
        for attribute, value in vars(module).items()
    }


def kernels_of(op: str) -> str:
    """Returns every registration of ``op`` and what serves each key."""
    return torch._C._dispatch_dump(op) + torch._C._dispatch_dump_table(op)
