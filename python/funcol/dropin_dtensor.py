"""funcol under PyTorch's DTensor: what :func:`funcol.install` puts in place, and how it is taken away again."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import _collective_utils as stock_collectives
from torch.distributed.tensor import _redistribute as stock_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, TupleStrategy
from torch.distributed.tensor._ops import utils as stock_ops
from torch.distributed.tensor._sharding_prop import ShardingPropagator as StockPropagator
from torch.utils._pytree import tree_leaves

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


# Of these, PyTorch's choice among several of equal cost, or beyond what rows of one axis say, is its own.
_DECIDED_BY_PYTORCH = {
    torch.ops.aten.index_add.default,
    torch.ops.aten.mv.default,
    torch.ops.aten.native_group_norm_backward.default,
    torch.ops.aten.repeat.default,
    torch.ops.aten.softplus_backward.default,
    torch.ops.aten.stack.default,
}


class DropinPropagator(ShardingPropagator):
    """Decides as PyTorch's propagator ``base`` does: programs count on where results are.

    Where both are known to agree, C++ decides: for operators with a rule there, tensors that are plain shards
    or replicated, and sizes that divide by the ranks of the mesh. Else ``base`` is asked, and followed unless
    its decision contradicts the rule of the operator, that is, gives wrong numbers. Both price redistribution
    as DTensor does. Rules are those of ``base`` at any time, and what is registered here is registered there.
    """

    def __init__(self, base: StockPropagator) -> None:
        super().__init__(base, cost_model=_C.DTensorCosts())
        for name, table in _compat.tables(base).items():
            setattr(self, name, table)
        self._rules = {name: dict(getattr(base, name)) for name in _compat.rule_tables(base)}
        self._agreeing = functools.lru_cache(maxsize=8192)(self._decide_with_base)

    def register_sharding_prop_rule(self, *args: Any, **kwargs: Any) -> None:
        self._base.register_sharding_prop_rule(*args, **kwargs)
        self.cache_clear()

    def register_op_strategy(self, *args: Any, **kwargs: Any) -> None:
        self._base.register_op_strategy(*args, **kwargs)
        self.cache_clear()

    def cache_clear(self) -> None:
        super().cache_clear()
        self._agreeing.cache_clear()

    def _propagate(self, op_schema: OpSchema, remember: bool) -> OutputSharding:
        op = op_schema.op
        if op in self._own_rows or (self._has_rule(op) and _is_plain(op_schema)):
            return super()._propagate(op_schema, remember)
        if remember and not _has_symbols(op_schema):
            return self._agreeing(op_schema)
        return self._decide_with_base(op_schema)

    def _has_rule(self, op: OpOverload) -> bool:
        """A rule in C++, in the place of PyTorch's own."""
        return (
            _C.has_rule(op.name())  # type: ignore[no-untyped-call]
            and op not in _DECIDED_BY_PYTORCH
            and all(getattr(self._base, name).get(op) is rules.get(op) for name, rules in self._rules.items())
        )

    def _decide_with_base(self, op_schema: OpSchema) -> OutputSharding:
        try:
            theirs = self._base.propagate_op_sharding_non_cached(op_schema)
        except NotImplementedError:
            if not self._has_rule(op_schema.op):
                raise
            return super()._propagate(op_schema, remember=False)
        contradicts = (
            self._has_rule(op_schema.op)
            and not _has_symbols(op_schema)
            and self._contradicts(op_schema, theirs)
        )
        if contradicts:
            return super()._propagate(op_schema, remember=False)
        return theirs

    def _contradicts(self, op_schema: OpSchema, sharding: OutputSharding) -> bool:
        """Whether no way to run the operator is the one of ``sharding``."""
        try:
            ways = self.strategies(op_schema)
        except (NotImplementedError, ValueError):
            return False
        if isinstance(ways, TupleStrategy):
            return False
        inputs = [spec.placements for spec in _specs(sharding.redistribute_schema or op_schema)]
        outputs = [None if spec is None else spec.placements for spec in _listed(sharding.output_spec)]
        return not any(
            [spec.placements for spec in way.input_specs or ()] == inputs
            and [None if spec is None else spec.placements for spec in _listed(way.output_specs)] == outputs
            for way in ways.strategies
        )


def _has_symbols(op_schema: OpSchema) -> bool:
    return any(type(size) is not int for spec in _specs(op_schema) for size in spec.shape)


def _is_plain(op_schema: OpSchema) -> bool:
    """Whether all tensors are replicated or plain shards, of sizes that divide by the ranks of the mesh."""
    specs = _specs(op_schema)
    if not specs:
        return False
    num_ranks = specs[0].mesh.size()
    for spec in specs:
        assert spec.tensor_meta is not None
        sizes = spec.tensor_meta.shape
        if not all(type(size) is int and (size == 1 or (size and size % num_ranks == 0)) for size in sizes):
            return False
        for placement in spec.placements:
            if type(placement) is Shard:
                if sizes[placement.dim] == 1:
                    return False
            elif type(placement) is not Replicate:
                return False
        if any(entry.mesh_dims != tuple(sorted(entry.mesh_dims)) for entry in spec.shard_order or ()):
            return False
    return True


def _specs(op_schema: OpSchema) -> list[DTensorSpec]:
    leaves = tree_leaves(
        (op_schema.args_schema, op_schema.kwargs_schema), is_leaf=lambda leaf: isinstance(leaf, DTensorSpec)
    )
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def _listed(specs: Any) -> list[Any]:
    return list(specs) if isinstance(specs, (list, tuple)) else [specs]


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
        self._propagator: DropinPropagator | None = None
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
            self._propagator = DropinPropagator(theirs)
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
            self._dispatcher.sharding_propagator = self._propagator._base
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
