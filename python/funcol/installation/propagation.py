"""Sharding propagation while funcol is under DTensor: the decisions are those of PyTorch's propagator."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, TupleStrategy
from torch.distributed.tensor._sharding_prop import ShardingPropagator as StockPropagator
from torch.distributed.tensor.placement_types import _MaskPartial

from .. import _C, _compat
from ..redistribution.specs import has_symbols
from ..sharding.op_schemas import all_specs_of, with_specs
from ..sharding.propagation import ShardingPropagator
from . import pytorch_rules, view_writeback, without_rule

# PyTorch's rule for these operators does not end where several sizes are 0.
_RESHAPES = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.view.default,
    torch.ops.aten.view_copy.default,
}


# Decisions for calls that C++ does not handle: PyTorch remembers them by thread, in a table without a limit.
MOST_DECISIONS_IN_PYTORCH = 8192


class InstalledPropagator(ShardingPropagator):
    """Decides as PyTorch's propagator ``base`` does: programs count on where results are.

    C++ decides in releases whose rules are of one mesh axis. It queries ``base`` for the rule of the call,
    composes its rows over all axes and prices redistribution as DTensor does, so that the decision is that of
    ``base``, ties included. The decision is followed unless it contradicts the operator's rule in C++, that
    is, gives wrong numbers; then that rule decides, as it does for operators for which ``base`` has no rule.
    What C++ cannot compose is left to ``base``: :func:`funcol.installation.decision_counts` counts it. Rules
    are those of ``base`` at any time; rules that are registered here go there.
    """

    _moves_keywords = True

    def __init__(self, base: StockPropagator) -> None:
        super().__init__(base, cost_model=_C.DTensorCosts())  # type: ignore[arg-type]
        for name, table in _compat.tables(base).items():
            setattr(self, name, table)
        self._has_axis_rules = _compat.has_rules_of_an_axis(base)
        own = {
            name: {op: rule for op, rule in getattr(base, name).items() if _compat.is_own_rule(rule)}
            for name in _compat.rule_tables(base)
        }
        self._rules = _C.UpstreamRules(base, own, self._own_rows)
        self._remembered_fallback = functools.lru_cache(maxsize=MOST_DECISIONS_IN_PYTORCH)(
            self._decide_fallback
        )

    def register_sharding_prop_rule(self, *args: Any, **kwargs: Any) -> None:
        self._base.register_sharding_prop_rule(*args, **kwargs)
        self.cache_clear()

    def register_op_strategy(self, *args: Any, **kwargs: Any) -> None:
        self._base.register_op_strategy(*args, **kwargs)
        self.cache_clear()

    def cache_clear(self) -> None:
        super().cache_clear()
        self._rules.clear()
        self._remembered_fallback.cache_clear()
        _C.forget_call_plans()

    def _forget_rules(self, op: OpOverload) -> None:
        super()._forget_rules(op)
        _C.forget_call_plans()

    def _propagate(self, op_schema: OpSchema, remember: bool) -> OutputSharding:
        if _compat.num_decisions() >= MOST_DECISIONS_IN_PYTORCH:
            _C.forget_upstream_decisions_later()
        op = op_schema.op
        op_schema = self._with_complete_info(op_schema)
        if op in self._own_rows or op is torch.ops.aten._local_scalar_dense.default:
            return super()._propagate(op_schema, remember)
        has_rule = self._has_rule(op)
        if has_rule and op in _RESHAPES and _has_empty_tensor(op_schema):
            return super()._propagate(op_schema, remember)
        fallback = self._fall_back if remember else self._decide_fallback
        if has_rule and not _compat.has_rule(self._base, op):
            # PyTorch would try the parts of the operator on every combination of placements: minutes for
            # attention with a mask.
            try:
                return super()._propagate(op_schema, remember)
            except IndexError as error:  # no such dim: PyTorch says so, now or as the operator runs
                if is_shape_error(error):
                    raise
                return fallback(op_schema, "metas")
            except ValueError as error:
                if not view_writeback.is_in_place(op) or is_shape_error(error):
                    raise
                return fallback(op_schema, "write")
        if not self._has_axis_rules:
            return fallback(op_schema, "minor")
        try:
            sharding: OutputSharding = self._engine.propagate_as_pytorch(
                op_schema, self._rules, self.rule_of, fallback, self._assemble, remember
            )
        except pytorch_rules.RefusedError:
            return fallback(op_schema, "refused")
        except IndexError:  # a dim that is not there, as above
            return fallback(op_schema, "metas")
        return sharding

    def engine_and_rules(self) -> tuple[_C.ShardingEngine, _C.UpstreamRules | None]:
        """Returns the engine and the rules by which it decides calls without Python; ``None`` if it does
        not."""
        return self._engine, self._rules if self._has_axis_rules else None

    def rule_of(self, op_schema: OpSchema, index: int | None) -> Any:
        """Returns the rule of ``base`` for a call, or for element ``index`` of its lists."""
        return pytorch_rules.rule_of(self._base, op_schema, index)

    def _assemble(self, op_schema: OpSchema, elements: list[Any]) -> OutputSharding:
        _C.count_decision(op_schema.op, "C++")
        return super()._assemble(op_schema, elements)

    def _fall_back(self, op_schema: OpSchema, reason: str) -> OutputSharding:
        if _has_symbols(op_schema):
            return self._decide_fallback(op_schema, reason)
        return self._remembered_fallback(op_schema, reason, torch.get_default_dtype())

    def _decide_fallback(
        self, op_schema: OpSchema, reason: str, default_dtype: torch.dtype | None = None
    ) -> OutputSharding:
        """Returns the decision of ``base``, or, if ``base`` raises an error, that of the rule in C++.
        ``default_dtype`` distinguishes remembered decisions."""
        _C.count_decision(op_schema.op, reason)
        if reason == "refused" and self._has_rule(op_schema.op):
            return self._decide_where_base_refuses(op_schema)
        return self._decide_with_base(op_schema, reason)

    def _has_rule(self, op: OpOverload) -> bool:
        """Returns true if a rule in C++ replaces PyTorch's own."""
        return self._rules.is_in_cpp(op)

    def _decide_with_base(self, op_schema: OpSchema, reason: str) -> OutputSharding:
        try:
            theirs = self._base.propagate_op_sharding_non_cached(op_schema)
        except Exception as error:  # wrong rules raise anything: KeyError, AssertionError
            if is_shape_error(error):
                found = None if reason == "metas" else self._decide_for_known_results(op_schema)
                if found is None:
                    raise
                return found
            return self._decide_without_base(op_schema, error)
        self._make_sizes_local(theirs, op_schema)
        if not self._has_rule(op_schema.op) and _loses_written(op_schema, theirs):
            on_copies = self._decide_on_copies(op_schema)
            if on_copies is None:
                raise ValueError(
                    f"funcol: {op_schema} has to redistribute the tensor that it writes to. Redistribute it "
                    "first, or use the operator that returns a new tensor."
                )
            return on_copies
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
                moved = with_specs(op_schema, all_specs_of(theirs.redistribute_schema or op_schema))
                if _moves_written(op_schema, theirs) or self._contradicts(moved, theirs):
                    on_copies = self._decide_on_copies(op_schema)
                    if on_copies is None:
                        raise
                    return on_copies
        return theirs

    def _decide_without_base(self, op_schema: OpSchema, error: Exception) -> OutputSharding:
        """Decides after ``base`` has raised ``error``."""
        op = op_schema.op
        if self._has_rule(op):
            if _has_symbols(op_schema):
                raise error
            return self._decide_where_base_refuses(op_schema)
        if _compat.has_rule(self._base, op) or not without_rule.runs_replicated(op):
            raise error
        return without_rule.decide_replicated(op_schema, self._base._propagate_tensor_meta_non_cached)

    def _decide_for_known_results(self, op_schema: OpSchema) -> OutputSharding | None:
        """Decides by the rule in C++ where ``base`` could not run the operator on fake tensors; ``None`` if
        C++ cannot either, or has no rule."""
        if not self._has_rule(op_schema.op) or _has_symbols(op_schema):
            return None
        try:
            return self._decide_where_base_refuses(op_schema, _raise_unknown_results)
        except _UnknownResultsError:
            return None

    def _decide_where_base_refuses(
        self, op_schema: OpSchema, fallback: Callable[[OpSchema, bool], OutputSharding] | None = None
    ) -> OutputSharding:
        try:
            return self._decide_in_cpp(op_schema, False, fallback or self._decide_by_full_mesh_rules)
        except (ValueError, RuntimeError) as error:
            if is_shape_error(error):
                raise
            on_copies = self._decide_on_copies(op_schema)
            if on_copies is None:
                raise
            return on_copies

    def _decide_on_copies(self, op_schema: OpSchema) -> OutputSharding | None:
        """Decides to run an operator in place on copies, which :mod:`funcol.installation.view_writeback`
        writes back. ``None`` if the operator is not in place, or no copy makes it right."""
        if not view_writeback.is_in_place(op_schema.op):
            return None
        held = all_specs_of(op_schema)[0]
        for copied in view_writeback.copies_to_write_to(op_schema):
            try:
                sharding = super()._propagate(copied, remember=False)
            except (ValueError, RuntimeError):
                continue
            if sharding.output_spec is not None and view_writeback.can_write_back(held):
                sharding.output_spec = held
            sharding.redistribute_schema = sharding.redistribute_schema or copied
            sharding.needs_redistribute = True
            return sharding
        return None

    def _contradicts(self, op_schema: OpSchema, sharding: OutputSharding) -> bool:
        """Returns true if the operator has no strategy like ``sharding``."""
        try:
            strategies = self.strategies(op_schema)
        except Exception:  # wrong rules raise anything
            return False
        if isinstance(strategies, TupleStrategy):
            return False
        inputs = _placements(all_specs_of(sharding.redistribute_schema or op_schema))
        outputs = _placements(_as_list(sharding.output_spec))
        return not any(
            _placements(strategy.input_specs or ()) == inputs
            and _placements(_as_list(strategy.output_specs)) == outputs
            for strategy in strategies.strategies
        )


class _UnknownResultsError(Exception):
    """C++ does not know the sizes of an operator's results."""


def _raise_unknown_results(op_schema: OpSchema, remember: bool) -> OutputSharding:
    raise _UnknownResultsError


def _placements(specs: Iterable[DTensorSpec | None]) -> list[list[Any] | None]:
    """Returns the placements of each spec; masks as text, since every decision has a mask of its own."""
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


def _loses_written(op_schema: OpSchema, sharding: OutputSharding) -> bool:
    """Returns true if ``sharding`` gives the tensor that the operator writes to other placements."""
    held: Any = op_schema.args_schema[0]
    result: Any = sharding.output_spec
    return (
        view_writeback.writes_to_first(op_schema.op)
        and isinstance(held, DTensorSpec)
        and isinstance(result, DTensorSpec)
        and result.placements != held.placements
    )


def _moves_written(op_schema: OpSchema, sharding: OutputSharding) -> bool:
    """Returns true if ``sharding`` redistributes a tensor that the operator writes to: it would write to a
    copy."""
    wanted = sharding.redistribute_schema or op_schema
    pairs = itertools.zip_longest(op_schema.args_schema, wanted.args_schema)
    arguments = [one for one in op_schema.op._schema.arguments if not one.kwarg_only]
    trains = op_schema.op in _BATCH_NORMS and op_schema.args_schema[5] is True
    return any(
        held != wanted_spec
        and (
            (argument.alias_info is not None and argument.alias_info.is_write)
            or (trains and argument.name in ("running_mean", "running_var"))
        )
        for argument, (held, wanted_spec) in zip(arguments, pairs, strict=False)
    )


def _has_empty_tensor(op_schema: OpSchema) -> bool:
    return any(type(size) is int and size == 0 for spec in all_specs_of(op_schema) for size in spec.shape)


def _has_symbols(op_schema: OpSchema) -> bool:
    return any(map(has_symbols, all_specs_of(op_schema)))


def _as_list(specs: Any) -> list[Any]:
    return list(specs) if isinstance(specs, (list, tuple)) else [specs]


# Errors of calls whose operator has no result for the shapes, as PyTorch's propagator raises them. PyTorch
# finds shapes of results by running the operator on fake tensors, which logs each failure with its traceback.
# No sharding rule can help such a call, so it fails at once.

_NOT_FOR_FAKE_TENSORS = (
    NotImplementedError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# The method of PyTorch's propagator that runs the operator on fake tensors.
_SHAPE_FUNCTION = "_propagate_tensor_meta_non_cached"
_PACKAGE = __name__.partition(".")[0]


def is_shape_error(error: Exception) -> bool:
    """Returns true if PyTorch's propagator raised ``error`` as it ran the operator on fake tensors.

    Errors of operators that cannot run on fake tensors do not count: their results, or the shapes of these,
    depend on values.
    """
    if isinstance(error, _NOT_FOR_FAKE_TENSORS):
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_name != _SHAPE_FUNCTION:
        frame = frame.tb_next
    return frame is not None


def as_pytorch_error(error: Exception, op_schema: OpSchema) -> RuntimeError:
    """Returns the error that PyTorch's dispatcher raises for ``error``, without frames of funcol."""
    raised = RuntimeError(f"{error}\n\nSharding propagation failed for {op_schema}")
    raised.__cause__ = error.with_traceback(_below_funcol(error.__traceback__))
    return raised


def _below_funcol(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        frames = frames.tb_next
    return frames
