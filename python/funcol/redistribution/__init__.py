"""Redistribution of sharded tensors, its plans, and their costs.

Plans need no DTensor, which takes ten times as long to import as all of funcol. So the functions that need it
are imported at their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .. import _C

if TYPE_CHECKING:
    from .functions import redistribute, redistribute_local_tensor, redistribute_many
    from .plain_tensors import redistribute_tensor
    from .showing import show

__all__ = ["redistribute", "redistribute_local_tensor", "redistribute_many", "redistribute_tensor", "show"]


def _plan_as_html(plan: _C.Plan) -> str:
    from .plan_drawing import plan_as_html

    return plan_as_html(plan)


# For notebooks, which ask for it when a plan is the value of a cell.
_C.Plan._repr_html_ = _plan_as_html  # type: ignore[assignment,method-assign]


def __getattr__(name: str) -> Any:
    if name in __all__:
        importlib.import_module("torch.distributed.tensor")  # install() may wait for it
        from . import functions, plain_tensors, showing

        modules = {"redistribute_tensor": plain_tensors, "show": showing}
        found = getattr(modules.get(name, functions), name)
        globals()[name] = found  # from now on without this function
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
