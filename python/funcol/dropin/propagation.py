"""Sharding propagation while funcol is under DTensor: the decisions are those of PyTorch's propagator."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, TupleStrategy
from torch.distributed.tensor._sharding_prop import ShardingPropagator as StockPropagator
from torch.distributed.tensor.placement_types import _MaskPartial

from .. import _C, _compat
from ..redistribution.specs import has_own_order, has_symbols
from ..sharding.op_schemas import specs_in, with_replicated, with_specs
from ..sharding.propagation import ShardingPropagator
from . import writes

# For these operators, PyTorch's choice among decisions of equal cost, or among decisions that no rows of one
# axis give, differs from funcol's: PyTorch decides.
_DECIDED_BY_PYTORCH = {
    torch.ops.aten.index_add.default,
    torch.ops.aten.mv.default,
    torch.ops.aten.native_group_norm_backward.default,
    torch.ops.aten.repeat.default,
    torch.ops.aten.softplus_backward.default,
    torch.ops.aten.stack.default,
}


# For partial sums, PyTorch's rule and funcol's agree on these operators.
_SAME_FOR_SUMS = {
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.neg.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
}


# PyTorch's rule for these operators does not end where several sizes are 0.
_RESHAPES = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.view.default,
    torch.ops.aten.view_copy.default,
}


class DropinPropagator(ShardingPropagator):
    """Decides as PyTorch's propagator ``base`` does: programs count on where results are.

    C++ decides where both are known to agree: in minors whose rules are of one mesh axis, for operators with
    such a rule in both, tensors that are replicated or plain shards, and sizes that every number of shards
    divides. C++ decides also where ``base`` has no rule. Else ``base`` decides, and is followed unless its
    decision contradicts the operator's rule, that is, gives wrong numbers. Both price redistribution as
    DTensor does. Rules are those of ``base`` at any time; rules that are registered here go there.
    """

    _moves_keywords = True

    def __init__(self, base: StockPropagator) -> None:
        super().__init__(base, cost_model=_C.DTensorCosts())  # type: ignore[arg-type]
        for name, table in _compat.tables(base).items():
            setattr(self, name, table)
        self._agrees = _compat.has_rules_of_an_axis(base)
        self._rules = {
            name: {op: rule for op, rule in getattr(base, name).items() if _compat.is_own_rule(rule)}
            for name in _compat.rule_tables(base)
        }
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
        _C.forget_served_calls()

    def _forget_rules(self, op: OpOverload) -> None:
        super()._forget_rules(op)
        _C.forget_served_calls()

    def _propagate(self, op_schema: OpSchema, remember: bool) -> OutputSharding:
        op = op_schema.op
        op_schema = self._named(op_schema)
        if op in self._own_rows or op is torch.ops.aten._local_scalar_dense.default:
            return super()._propagate(op_schema, remember)
        if op in _RESHAPES and self._has_rule(op) and _holds_nothing(op_schema):
            return super()._propagate(op_schema, remember)
        if self._knows_alone(op) or (self._agrees_on(op) and _is_plain(op_schema)):
            try:
                return super()._propagate(op_schema, remember)
            except IndexError:  # a dim that is not there: PyTorch says so, now or as the operator runs
                pass
            except ValueError:
                if not writes.writes_to_first(op):
                    raise
        if remember and not _has_symbols(op_schema):
            return self._agreeing(op_schema)
        return self._decide_with_base(op_schema)

    def _agrees_on(self, op: OpOverload) -> bool:
        return self._agrees and self._has_rule(op) and not _compat.decides_for_whole_mesh(self._base, op)

    def _knows_alone(self, op: OpOverload) -> bool:
        """Whether C++ has a rule for ``op`` where PyTorch has none.

        PyTorch would try the parts of the operator on every combination of placements: minutes for attention
        with a mask.
        """
        return self._has_rule(op) and not _compat.has_rule(self._base, op)

    def _has_rule(self, op: OpOverload) -> bool:
        """A rule in C++, in the place of PyTorch's own."""
        return (
            _C.has_rule(op.name())  # type: ignore[no-untyped-call]
            and op not in _DECIDED_BY_PYTORCH
            and torch.Tag.inplace_view not in op.tags  # which make the tensor another one
            and all(getattr(self._base, name).get(op) is rules.get(op) for name, rules in self._rules.items())
        )

    def _decide_with_base(self, op_schema: OpSchema) -> OutputSharding:
        try:
            theirs = self._base.propagate_op_sharding_non_cached(op_schema)
        except Exception:  # wrong rules raise anything: KeyError, AssertionError
            if not self._has_rule(op_schema.op) or _has_symbols(op_schema):
                raise
            try:
                return super()._propagate(op_schema, remember=False)
            except ValueError:
                through = (
                    self._written_through(op_schema) if op_schema.op in writes.TO_CHOSEN_ELEMENTS else None
                )
                if through is None:
                    raise
                return through
        self._adjust_what_stock_left(theirs, op_schema)
        contradicts = (
            self._has_rule(op_schema.op)
            and not _has_symbols(op_schema)
            and self._contradicts(op_schema, theirs)
        )
        if contradicts:
            try:
                return super()._propagate(op_schema, remember=False)
            except ValueError:
                # funcol makes no partials of shards, even where a partial that is written to has to stay.
                moved = theirs.redistribute_schema or op_schema
                if _moves_written(op_schema, theirs) or self._contradicts(moved, theirs):
                    if not writes.writes_to_first(op_schema.op):
                        raise
                    return self._written_through(op_schema)
        return theirs

    def _written_through(self, op_schema: OpSchema) -> OutputSharding:
        """The decision to run an operator that writes to its first tensor on a copy, which
        :mod:`funcol.dropin.writes` brings back. The copy is replicated along as few axes as possible."""
        held, *others = _specs(op_schema)
        axes = [axis for axis, placement in enumerate(held.placements) if not placement.is_replicate()]
        for count in range(1, len(axes) + 1):
            for some in itertools.combinations(axes, count):
                copied = with_specs(op_schema, [with_replicated(held, set(some)), *others])
                try:
                    sharding = super()._propagate(copied, remember=False)
                except ValueError:
                    continue
                sharding.output_spec = held
                sharding.redistribute_schema = sharding.redistribute_schema or copied
                sharding.needs_redistribute = True
                return sharding
        raise ValueError(f"funcol: {op_schema} cannot run, wherever the tensor that it writes to is.")

    def _contradicts(self, op_schema: OpSchema, sharding: OutputSharding) -> bool:
        """Whether the operator has no strategy like ``sharding``."""
        try:
            ways = self.strategies(op_schema)
        except (NotImplementedError, ValueError, IndexError):
            return False
        if isinstance(ways, TupleStrategy):
            return False
        inputs = _placements(_specs(sharding.redistribute_schema or op_schema))
        outputs = _placements(_listed(sharding.output_spec))
        return not any(
            _placements(way.input_specs or ()) == inputs and _placements(_listed(way.output_specs)) == outputs
            for way in ways.strategies
        )


def _placements(specs: Iterable[DTensorSpec | None]) -> list[list[Any] | None]:
    """The placements of each spec; masks as text, since every decision has a mask of its own."""
    return [
        None
        if spec is None
        else [str(one) if isinstance(one, _MaskPartial) else one for one in spec.placements]
        for spec in specs
    ]


# Batch norms write to their running statistics in training, though their schemas do not say so.
_BATCH_NORMS = {
    torch.ops.aten.cudnn_batch_norm.default,
    torch.ops.aten.miopen_batch_norm.default,
    torch.ops.aten.native_batch_norm.default,
}


def _moves_written(op_schema: OpSchema, sharding: OutputSharding) -> bool:
    """Whether ``sharding`` redistributes a tensor that the operator writes to, that is, writes to a copy."""
    wanted = sharding.redistribute_schema or op_schema
    pairs = itertools.zip_longest(op_schema.args_schema, wanted.args_schema)
    arguments = [one for one in op_schema.op._schema.arguments if not one.kwarg_only]
    trains = op_schema.op in _BATCH_NORMS and op_schema.args_schema[5] is True
    return any(
        held != asked
        and (
            (argument.alias_info is not None and argument.alias_info.is_write)
            or (trains and argument.name in ("running_mean", "running_var"))
        )
        for argument, (held, asked) in zip(arguments, pairs, strict=False)
    )


def _holds_nothing(op_schema: OpSchema) -> bool:
    return any(type(size) is int and size == 0 for spec in _specs(op_schema) for size in spec.shape)


def _has_symbols(op_schema: OpSchema) -> bool:
    return any(map(has_symbols, _specs(op_schema)))


def _is_plain(op_schema: OpSchema) -> bool:
    """Whether all tensors are replicated or plain shards, of sizes that divide evenly however they are cut;
    or partial sums, where an operator takes these as they are."""
    specs = _specs(op_schema)
    if not specs:
        return False
    numbers = _numbers_of_shards(tuple(specs[0].mesh.shape))
    for spec in specs:
        assert spec.tensor_meta is not None
        sizes = spec.tensor_meta.shape
        if not all(type(size) is int and size and _is_even(size, numbers) for size in sizes):
            return False
        lengths = list(sizes)
        for axis, placement in enumerate(spec.placements):
            if type(placement) is Shard:
                lengths[placement.dim], rest = divmod(lengths[placement.dim], spec.mesh.size(axis))
                if rest:
                    return False
            elif type(placement) is Partial:
                if placement.reduce_op != "sum" or op_schema.op not in _SAME_FOR_SUMS:
                    return False
            elif type(placement) is not Replicate:
                return False
        if has_own_order(spec):
            return False
    return True


@functools.cache
def _numbers_of_shards(mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Into how many shards a dim may be cut: by some of the axes, or by all."""
    axes = range(1, len(mesh_shape) + 1)
    cuts = (math.prod(some) for count in axes for some in itertools.combinations(mesh_shape, count))
    return tuple(sorted(set(cuts)))


def _is_even(size: int, numbers: tuple[int, ...]) -> bool:
    """Whether each of ``numbers`` divides ``size``, or exceeds it: then the dim is not cut."""
    return all(size % number == 0 or size < number for number in numbers)


def _specs(op_schema: OpSchema) -> list[DTensorSpec]:
    return specs_in((op_schema.args_schema, op_schema.kwargs_schema))


def _listed(specs: Any) -> list[Any]:
    return list(specs) if isinstance(specs, (list, tuple)) else [specs]
