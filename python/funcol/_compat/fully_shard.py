"""Differences of FSDP2 between PyTorch releases."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

# Variables that some releases have, and the values with which FSDP2 runs as usual.
_SWITCHES = [
    ("torch.distributed.fsdp._fully_shard._fsdp_common", "_compiled_autograd_enabled", False),
    ("torch.autograd.profiler", "_active_cuspy_profiler_observer", None),
]


def switches() -> list[tuple[ModuleType, str, Any]]:
    """Returns modules, their variables, and the values with which FSDP2 runs as usual."""
    return [
        (sys.modules[module], name, value)
        for module, name, value in _SWITCHES
        if hasattr(sys.modules[module], name)
    ]


def has_cuspy_observer() -> bool:
    """Returns true if the cuspy profiler of newer PyTorch releases observes ranges of ``record_function``."""
    return getattr(torch.autograd.profiler, "_active_cuspy_profiler_observer", None) is not None


def type_checker() -> Any:
    """Returns the package ``spmd_types`` if FSDP2 tells it the types of parameters, as newer releases do if
    the package is installed; else ``None``."""
    is_available = getattr(dist, "_is_spmd_types_available", bool)()
    return importlib.import_module("spmd_types") if is_available else None


def param_groups(state: Any) -> list[Any]:
    """Returns the groups of parameters of an ``FSDPState``. Older releases have one at most."""
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = state._fsdp_param_group
        return [] if group is None else [group]
    return groups
