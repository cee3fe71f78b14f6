"""funcol under PyTorch's DTensor: what :func:`funcol.install` puts in place, and how it is taken away again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _collective_utils as stock_collectives
from torch.distributed.tensor import _redistribute as stock_redistribute
from torch.distributed.tensor._ops import utils as stock_ops
from torch.distributed.tensor._sharding_prop import ShardingPropagator as StockPropagator

from . import _C, _compat, dtensor
from .sharding import ShardingPropagator

_METHODS = {
    "to_local": dtensor.to_local,
    "from_local": staticmethod(dtensor.from_local),
    "redistribute": dtensor.redistribute,
    "full_tensor": dtensor.full_tensor,
}

_FUNCTIONS: list[tuple[ModuleType, Callable[..., Any]]] = [
    (stock_redistribute, dtensor.redistribute_local_tensor),
    (stock_collectives, dtensor.redistribute_cost),
    (stock_ops, dtensor.generate_redistribute_costs),
]


def taken_over() -> list[str]:
    """Names of what stands in for PyTorch's under DTensor."""
    names = [f"DTensor.{name}" for name in _METHODS]
    names += [function.__name__ for _, function in _FUNCTIONS]
    return [*names, "OpDispatcher.wrap", "OpDispatcher.sharding_propagator"]


class _Place(NamedTuple):
    holder: dict[str, Any]
    name: str
    theirs: Any
    ours: Any


class UnderDTensor:
    """funcol put under DTensor; :meth:`undo` takes it away, also where modules imported it meanwhile."""

    def __init__(self) -> None:
        self._stock = {id(ours): getattr(module, ours.__name__) for module, ours in _FUNCTIONS}
        self._methods = {name: vars(DTensor)[name] for name in _METHODS}
        self._dispatcher = DTensor._op_dispatcher
        self._propagator: ShardingPropagator | None = None
        self._own_wrap: Callable[[], None] | None = None
        self._places: list[_Place] = []
        try:
            self._put()
        except BaseException:
            self.undo()
            raise

    def _put(self) -> None:
        ours_by_theirs = {id(self._stock[id(ours)]): ours for _, ours in _FUNCTIONS}
        for holder, name, theirs in _functions_everywhere(ours_by_theirs):
            ours = ours_by_theirs[id(theirs)]
            self._places.append(_Place(holder, name, theirs, ours))
            holder[name] = ours
        for name, method in _METHODS.items():
            setattr(DTensor, name, method)
        self._own_wrap = _compat.redirected(type(self._dispatcher).wrap, dtensor.wrap)
        theirs = self._dispatcher.sharding_propagator
        if type(theirs) is StockPropagator:
            self._propagator = ShardingPropagator(theirs, cost_model=_C.DTensorCosts())
            self._dispatcher.sharding_propagator = self._propagator
        _compat.forget_decisions()

    def undo(self) -> None:
        for place in self._places:
            if place.holder.get(place.name) is place.ours:
                place.holder[place.name] = place.theirs
        for holder, name, ours in _functions_everywhere(self._stock):
            if holder is not vars(dtensor):
                holder[name] = self._stock[id(ours)]
        for name, method in self._methods.items():
            setattr(DTensor, name, method)
        if self._own_wrap is not None:
            self._own_wrap()
        if self._propagator is not None and self._dispatcher.sharding_propagator is self._propagator:
            self._dispatcher.sharding_propagator = self._propagator.give_back()
        _compat.forget_decisions()


def _functions_everywhere(wanted: dict[int, Any]) -> list[tuple[dict[str, Any], str, Any]]:
    """Where modules hold an object whose id is in ``wanted``."""
    return [
        (holder, name, value)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and (holder := vars(module)) is not vars(dtensor)
        for name, value in list(holder.items())
        if id(value) in wanted
    ]
