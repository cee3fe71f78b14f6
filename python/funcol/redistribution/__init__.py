"""Redistribution of sharded tensors, its plans, and their costs.

Plans need no DTensor, which takes ten times as long to import as all of funcol. So the functions that need it
are imported at their first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .functions import redistribute, redistribute_local_tensor, redistribute_many
    from .plain_tensors import redistribute_tensor

__all__ = ["redistribute", "redistribute_local_tensor", "redistribute_many", "redistribute_tensor"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import functions, plain_tensors

        found = getattr(plain_tensors if name == "redistribute_tensor" else functions, name)
        globals()[name] = found  # from now on without this function
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
