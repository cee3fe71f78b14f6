"""Redistribution of sharded tensors, its plans, and their costs.

Plans need no DTensor, which takes ten times as long to import as all of funcol. So the functions that need it
are imported at their first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .. import _C
from .cost_models import AlphaBeta, AxisCost, LinkCost, StepCounts
from .owners import Owned, OwnedTensor, assign_owners
from .planning import (
    MeshChange,
    Plan,
    Step,
    greedy_redistribution,
    plan_mesh_change,
    plan_redistribution,
)

if TYPE_CHECKING:
    from .functions import redistribute, redistribute_local_tensor, redistribute_many
    from .plain_tensors import PartitionSpec, Varying, redistribute_tensor
    from .visualize import show

_NEED_DTENSOR = {
    "PartitionSpec": "plain_tensors",
    "Varying": "plain_tensors",
    "redistribute": "functions",
    "redistribute_local_tensor": "functions",
    "redistribute_many": "functions",
    "redistribute_tensor": "plain_tensors",
    "show": "visualize",
}

__all__ = [
    "AlphaBeta",
    "AxisCost",
    "LinkCost",
    "MeshChange",
    "Owned",
    "OwnedTensor",
    "PartitionSpec",
    "Plan",
    "Step",
    "StepCounts",
    "Varying",
    "assign_owners",
    "greedy_redistribution",
    "plan_mesh_change",
    "plan_redistribution",
    "redistribute",
    "redistribute_local_tensor",
    "redistribute_many",
    "redistribute_tensor",
    "show",
]


def _plan_as_html(plan: _C.Plan) -> str:
    from .plan_drawing import plan_as_html

    return plan_as_html(plan)


# Notebooks call it when a plan is the value of a cell.
_C.Plan._repr_html_ = _plan_as_html  # type: ignore[assignment,method-assign]


if not TYPE_CHECKING:  # it would hide misspelled names from type checkers

    def __getattr__(name: str) -> Any:
        if name in _NEED_DTENSOR:
            importlib.import_module("torch.distributed.tensor")  # install() may wait for it
            found = getattr(importlib.import_module(f"{__name__}.{_NEED_DTENSOR[name]}"), name)
            globals()[name] = found  # later uses bypass this function
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
