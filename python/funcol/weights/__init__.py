"""The full weights of a model: streamed out of it and into it, and kept in sync with another model.

All of it needs DTensor, which takes ten times as long to import as all of funcol. So the modules are imported
at their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .export import full_tensors
    from .fusing import Cat, Stack
    from .optimizer_states import full_optimizer_state_dict, load_full_optimizer_state_dict
    from .state_dicts import full_state_dict, load_full_state_dict
    from .sync import WeightSync

_MODULES = {
    "Cat": "fusing",
    "Stack": "fusing",
    "WeightSync": "sync",
    "full_optimizer_state_dict": "optimizer_states",
    "full_state_dict": "state_dicts",
    "full_tensors": "export",
    "load_full_optimizer_state_dict": "optimizer_states",
    "load_full_state_dict": "state_dicts",
}

__all__ = [
    "Cat",
    "Stack",
    "WeightSync",
    "full_optimizer_state_dict",
    "full_state_dict",
    "full_tensors",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
]


if not TYPE_CHECKING:  # it would hide misspelled names from type checkers

    def __getattr__(name: str) -> Any:
        if name in __all__:
            importlib.import_module("torch.distributed.tensor")  # install() may wait for it
            found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
            globals()[name] = found  # later uses bypass this function
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
