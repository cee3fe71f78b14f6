"""Functions on local tensors, applied to sharded ones: eagerly, under tracers, and for solvers.

PyTorch counterpart: ``torch.distributed.tensor.experimental.local_map``.
"""

import importlib
from typing import TYPE_CHECKING, Any

import torch.distributed.tensor  # noqa: F401 (first: install() may wait for it)

from .application import TraceableLocalMap, apply_local_map, call_in_compiled_region
from .options import get_local_map_placement_option

if TYPE_CHECKING:
    from .tracing import local_map_hop

__all__ = [
    "TraceableLocalMap",
    "apply_local_map",
    "call_in_compiled_region",
    "get_local_map_placement_option",
    "local_map_hop",
]

if not TYPE_CHECKING:  # it would hide misspelled names from type checkers

    def __getattr__(name: str) -> Any:
        if name == "local_map_hop":  # its module imports the compiler's
            found = importlib.import_module(f"{__name__}.tracing").local_map_hop
            globals()[name] = found  # later uses bypass this function
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
