"""The weights of a model as a whole: streamed out of it and into it.

All of it needs DTensor, which takes ten times as long to import as all of funcol. So the modules are imported
at their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .export import full_tensors
    from .state_dicts import full_state_dict, load_full_state_dict

__all__ = ["full_state_dict", "full_tensors", "load_full_state_dict"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        importlib.import_module("torch.distributed.tensor")  # install() may wait for it
        from . import export, state_dicts

        found = getattr(export if name == "full_tensors" else state_dicts, name)
        globals()[name] = found  # from now on without this function
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
