"""Redistribution of sharded tensors, the plans that it goes by, and what they cost.

Plans need no DTensor, which takes ten times as long to import as all of funcol: what does is imported when
somebody asks for it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .functions import redistribute, redistribute_local_tensor, redistribute_many

__all__ = ["redistribute", "redistribute_local_tensor", "redistribute_many"]

# By which the C++ library looks them up.
_NAMES_IN_CPP = {"_apply_mask", "_axis_group", "_debug_note", "_mask", "_target"}


def __getattr__(name: str) -> Any:
    if name in __all__ or name in _NAMES_IN_CPP:
        from . import functions

        return getattr(functions, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
