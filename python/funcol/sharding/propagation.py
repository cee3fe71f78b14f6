"""Sharding propagation: from the placements of an operator's tensors to those of its results, and to the
redistributions that come first.

The decision has the least cost over all mesh axes. C++ decides for operators with a rule in C++
(:func:`funcol.sharding.operators`). For other operators PyTorch's rule of one mesh axis is called once for
each schema; if a PyTorch release has none, its rule of the full mesh decides.

PyTorch counterpart: ``torch.distributed.tensor._sharding_prop``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed._functional_collectives as functional_collectives
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import (
    OpInfo,
    OpSchema,
    OpSpec,
    OpStrategy,
    OutputSharding,
    RuntimeSchemaInfo,
    TupleStrategy,
)
from torch.distributed.tensor._sharding_prop import ShardingPropagator as StockPropagator

from .. import _C, _compat
from ..redistribution import callbacks as callbacks  # which C++ calls
from ..redistribution.cost_models import CostModel
from . import keyword_tensors
from .op_schemas import (
    NORMS,
    decide_item,
    is_sharded,
    metas_of,
    qualified_name,
    specs_by_keyword,
    specs_of,
    specs_of_elements,
    squeezed_by_full_sizes,
    with_local_channels,
    with_local_shape,
    with_specs,
    without_extremes,
    without_own_rules,
    without_uneven_averages,
)

Row = Sequence["Placement | None"]
SingleAxisRule = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Sequence[Row]]


class CacheInfo(NamedTuple):
    """Counts of a cache of decisions, as ``functools.lru_cache`` gives them."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


def operators() -> list[str]:
    """Returns the names of the operators whose rules are in C++, such as ``"aten::mm"``, sorted."""
    return _C.ops_with_rules()


def redistribute_cost_table(
    sources: Sequence[DTensorSpec], targets: Sequence[DTensorSpec], *, cost_model: CostModel | None = None
) -> list[list[float]]:
    """Returns the costs of redistributing one tensor from each of ``sources`` to each of ``targets``.

    Entry ``[i][j]`` is the cost from ``sources[i]`` to ``targets[j]``, in microseconds for latency and
    bandwidth models, and infinity if there is no plan. It is the cost of :func:`funcol.plan_redistribution`,
    or more if its plan exchanges over several axes at once midway. All are specs of the same tensor on the
    same mesh; else ``ValueError`` is raised. All targets of a source share one search.

    PyTorch counterpart: ``torch.distributed.tensor._ops.utils.generate_redistribute_costs``, a plan an entry.
    """
    return _C.redistribute_cost_table(sources, targets, cost_model)


def is_pytorch_tracing() -> bool:
    """Returns true if a compiler or a tracer is active, whose sizes may be symbols."""
    return functional_collectives._are_we_tracing()


class _RuleTable(MutableMapping[OpOverload, Any]):
    """Rules by operator: those of another propagator at any time, some of them hidden or replaced by own
    ones."""

    def __init__(self, base: Mapping[OpOverload, Any]) -> None:
        self._base = base
        self._own: dict[OpOverload, Any] = {}
        self._hidden: set[OpOverload] = set()

    def hide(self, op: OpOverload) -> None:
        """Leaves ``op`` without a rule until one is entered here."""
        self._hidden.add(op)
        self._own.pop(op, None)

    def __getitem__(self, op: OpOverload) -> Any:
        if op in self._own:
            return self._own[op]
        if op in self._hidden:
            raise KeyError(op)
        return self._base[op]

    def __setitem__(self, op: OpOverload, rule: Any) -> None:
        self._own[op] = rule

    def __delitem__(self, op: OpOverload) -> None:
        self[op]
        self.hide(op)

    def __iter__(self) -> Iterator[OpOverload]:
        yield from self._own
        yield from (op for op in self._base if op not in self._own and op not in self._hidden)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _CachedPropagate:
    """``propagate_op_sharding`` with the two functions of its cache, as in PyTorch's propagator."""

    def __init__(self, propagator: ShardingPropagator) -> None:
        self._propagator = propagator

    def __call__(self, op_schema: OpSchema) -> OutputSharding:
        return self._propagator._propagate(op_schema, remember=True)

    def cache_info(self) -> CacheInfo:
        return self._propagator.cache_info()

    def cache_clear(self) -> None:
        self._propagator.cache_clear()


class ShardingPropagator(StockPropagator):
    """Decides on the specs of operators' results; takes and returns PyTorch's ``OpSchema``,
    ``OutputSharding`` and ``OpStrategy``, and can replace the dispatcher's own propagator.

    It has the rules of ``base`` (default: DTensor's propagator), including those registered later, and prices
    redistribution by ``cost_model`` (default: latency and bandwidth of one host). At most ``cache_size``
    decisions are cached, by value.
    """

    # True if keyword tensors are redistributed. DTensor's own dispatcher does not redistribute them.
    _moves_keywords = False

    def __init__(
        self,
        base: StockPropagator | None = None,
        *,
        cost_model: CostModel | None = None,
        cache_size: int = 8192,
    ) -> None:
        super().__init__()
        _compat.sort_candidate_placements(self)
        self._base = base or DTensor._op_dispatcher.sharding_propagator
        for name, table in _compat.tables(self._base).items():
            # Tables that DTensor's dispatcher reads in C++ have to be the dict itself.
            setattr(self, name, _RuleTable(table) if name in _compat.TABLES_OF_RULES else table)
        self._engine = _C.ShardingEngine(cost_model, cache_size, self._moves_keywords)
        self._own_rows: dict[OpOverload, SingleAxisRule] = {}
        tables = _compat.tables(self._base)
        self._info_tables = keyword_tensors.DispatcherInfoTables(
            [tables[name] for name in _compat.TABLES_OF_SCHEMA_INFO if name in tables]
        )
        self._cached_full_mesh_rules = functools.lru_cache(cache_size)(self._apply_full_mesh_rules)
        self.propagate_op_sharding = _CachedPropagate(self)  # type: ignore[assignment]

    # Rules

    def register_sharding_prop_rule(
        self,
        op_overload: OpOverload,
        rule_func: Callable[[OpSchema], OutputSharding],
        schema_info: RuntimeSchemaInfo | None = None,
    ) -> None:
        """Registers a function from the schema of ``op_overload`` to its output sharding. Replaces any rule.

        PyTorch counterpart: the method of the same name.
        """
        self._forget_rules(op_overload)
        super().register_sharding_prop_rule(op_overload, rule_func, schema_info)

    def register_op_strategy(
        self,
        op_overload: OpOverload,
        strategy_func: Callable[[OpSchema], Any],
        schema_info: RuntimeSchemaInfo | None = None,
    ) -> None:
        """Registers a function from the schema of ``op_overload``, with an ``OpStrategy`` for each tensor, to
        all ways to run it on the full mesh, with their costs. Replaces any rule.

        PyTorch counterpart: the method of the same name.
        """
        self._forget_rules(op_overload)
        super().register_op_strategy(op_overload, strategy_func, schema_info)

    def register_single_axis_rule(self, op_overload: OpOverload, rule: SingleAxisRule) -> None:
        """Registers ``rule(op, args, kwargs)``, which returns the rows of one mesh axis. Replaces any rule.

        ``args`` and ``kwargs`` are the operator's with a ``TensorMeta`` for each tensor. A row lists a
        placement for every output (``None`` where the operator returns no tensor) and then for every tensor
        argument. The row of ``Replicate`` alone may be left out. ``Shard(dim)`` is a plain shard; PyTorch's
        ``_ShardingPlaceholder(dim)`` stands for a shard of any kind.
        """
        self._forget_rules(op_overload)
        self._own_rows[op_overload] = rule

    def _forget_rules(self, op: OpOverload) -> None:
        for name in _compat.rule_tables(self):
            getattr(self, name).hide(op)
        self._own_rows.pop(op, None)
        self._engine.disable_rule(qualified_name(op))
        self._cached_full_mesh_rules.cache_clear()

    # Decisions

    def propagate(self, op_info: OpInfo) -> None:
        """Sets ``op_info.output_sharding`` from ``op_info.schema``."""
        assert op_info.schema is not None
        op_info.output_sharding = self._propagate(op_info.schema, remember=not is_pytorch_tracing())

    def propagate_op_sharding_non_cached(self, op_schema: OpSchema) -> OutputSharding:
        """Returns the specs of the results of ``op_schema``, and those that its arguments have to have.

        Raises ``NotImplementedError`` for an operator without a rule, naming it, near ones and how to
        register a rule; ``ValueError`` for tensors of several meshes, and for rules that contradict the
        operator.
        """
        return self._propagate(op_schema, remember=False)

    def _propagate(self, op_schema: OpSchema, remember: bool) -> OutputSharding:
        if op_schema.op is torch.ops.aten._local_scalar_dense.default:
            return decide_item(op_schema)
        return self._decide_in_cpp(op_schema, remember, self._decide_by_full_mesh_rules)

    def _decide_in_cpp(
        self, op_schema: OpSchema, remember: bool, fallback: Callable[[OpSchema, bool], OutputSharding]
    ) -> OutputSharding:
        """Returns the decision of C++, or of ``fallback`` if C++ has no rule or does not know the results."""
        sharding: OutputSharding = self._engine.propagate(
            self._with_complete_info(op_schema), self._rows_of, fallback, self._assemble, remember
        )
        return sharding

    def _with_complete_info(self, op_schema: OpSchema) -> OpSchema:
        """Returns ``op_schema`` with all arguments on which its decision depends, also in the dispatcher."""
        is_known = _compat.has_rule(self._base, op_schema.op)
        if DTensor._op_dispatcher.sharding_propagator is self:
            self._info_tables.complete(op_schema.op, is_known)
        return keyword_tensors.with_complete_info(op_schema, is_known)

    def strategies(self, op_schema: OpSchema) -> OpStrategy | TupleStrategy:
        """Returns all legal decisions on the full mesh, with the cost of redistributing each tensor argument
        from its spec, for global solvers, in the order of the full product of the rows of all axes, the first
        axis slowest. Returns a ``TupleStrategy`` if each element of a list is decided on its own.
        """
        found = self._engine.strategies(op_schema, self._rows_of)
        if found is None:
            return self._stock_strategies(op_schema)
        facts = _facts_of(op_schema.op)
        children = [
            OpStrategy(
                [
                    OpSpec(_returned(facts, outputs), tuple(inputs), [[cost] for cost in costs])
                    for outputs, inputs, costs, _ in element
                ]
            )
            for element in found
        ]
        return TupleStrategy(children) if facts.is_per_element else children[0]

    def cache_info(self) -> CacheInfo:
        """Returns counts of the cache of ``propagate_op_sharding``."""
        return CacheInfo(*self._engine.info())

    def cache_clear(self) -> None:
        """Forgets all decisions, and the costs of redistributions."""
        self._engine.clear()
        self._cached_full_mesh_rules.cache_clear()

    # Rules in Python

    def _rows_of(self, op_schema: OpSchema) -> Sequence[Row] | None:
        op = op_schema.op
        rule = self._own_rows.get(op)
        if rule is None and not _facts_of(op).is_per_element:  # PyTorch's own are for an element there
            rule = _compat.single_axis_rule(self, op)
        if rule is None:
            return None
        args = tuple(metas_of(argument) for argument in op_schema.args_schema)
        kwargs = {name: metas_of(argument) for name, argument in op_schema.kwargs_schema.items()}
        return rule(op, args, kwargs)

    def _decide_by_full_mesh_rules(self, op_schema: OpSchema, remember: bool) -> OutputSharding:
        """Decides by PyTorch's rules of the full mesh."""
        decide = self._cached_full_mesh_rules if remember else self._apply_full_mesh_rules
        return decide(op_schema, torch.get_default_dtype())

    def _apply_full_mesh_rules(self, op_schema: OpSchema, default_dtype: torch.dtype) -> OutputSharding:
        """Decides without the cache, of whose key ``default_dtype`` is a part."""
        try:
            wanted = without_extremes(op_schema) if op_schema.op in NORMS else op_schema
            sharding = super().propagate_op_sharding_non_cached(wanted)
            even = without_uneven_averages(wanted, sharding)
            if even is not None:
                wanted = even
                sharding = super().propagate_op_sharding_non_cached(wanted)
            if wanted is not op_schema:
                sharding.redistribute_schema = sharding.redistribute_schema or wanted
                sharding.needs_redistribute = True
            self._make_sizes_local(sharding, op_schema)
            return sharding
        except NotImplementedError as error:
            if _compat.has_rule(self, op_schema.op):
                raise
            wanted = without_own_rules(op_schema)
            if wanted is not op_schema:
                sharding = self._propagate(wanted, remember=False)
                sharding.redistribute_schema = sharding.redistribute_schema or wanted
                sharding.needs_redistribute = True
                return sharding
            raise NotImplementedError(_no_rule(op_schema.op)) from error

    def _make_sizes_local(self, sharding: OutputSharding, op_schema: OpSchema) -> None:
        """Replaces sizes among the arguments by this rank's where this PyTorch release does not."""
        if _compat.makes_sizes_local(self, op_schema.op):
            return
        schema = sharding.redistribute_schema or op_schema
        adjusted = self._local_arguments(schema, sharding.output_spec, specs_of(schema))
        if adjusted is not None:
            sharding.redistribute_schema = adjusted
            sharding.needs_redistribute = sharding.use_val_from_redistribute_schema = True

    def _stock_strategies(self, op_schema: OpSchema) -> OpStrategy | TupleStrategy:
        function = self.op_strategy_funcs.get(op_schema.op)
        if function is None:
            raise NotImplementedError(
                f"funcol: the strategies of {qualified_name(op_schema.op)} cannot be listed: it has no rule "
                "for one mesh axis, or what it returns depends on data. propagate_op_sharding() may decide "
                "it."
            )
        return cast("OpStrategy | TupleStrategy", function(self._wrap_with_op_strategy(op_schema)))

    # Results

    def _assemble(self, op_schema: OpSchema, elements: list[Any]) -> OutputSharding:
        facts = _facts_of(op_schema.op)
        if facts.is_per_element:
            outputs: Any = tuple(spec for element in elements for spec in element[0]) or None
            if not facts.num_returns:
                outputs = None
            moves = any(element[3] for element in elements)
            inputs = specs_of_elements(op_schema, elements)
        else:
            (all_outputs, inputs, _, moves) = elements[0]
            outputs = _returned(facts, all_outputs)
        suggestion = with_specs(op_schema, inputs) if moves else None
        adjusted = self._local_arguments(suggestion or op_schema, outputs, inputs)
        if adjusted is not None and suggestion is None:
            adjusted = with_specs(adjusted, inputs)  # programs may write to the call's specs later
        changed = adjusted or suggestion
        if changed is not None:
            held = {name: _C.copy_spec(spec) for name, spec in specs_by_keyword(op_schema)}
            changed = keyword_tensors.RedistributingSchema.of(changed, held) if held else changed
        return OutputSharding(
            outputs,
            changed,
            needs_redistribute=moves or adjusted is not None,
            use_val_from_redistribute_schema=adjusted is not None,
        )

    def _local_arguments(
        self, schema: OpSchema, output: Any, inputs: Sequence[DTensorSpec]
    ) -> OpSchema | None:
        """Returns ``schema`` with this rank's sizes in the place of full ones; ``None`` if it has none."""
        sizes = _facts_of(schema.op).sizes
        if sizes is None:
            return self._local_arguments_by_tables(schema, output, inputs)
        if sizes.shape is not None:
            if not is_sharded(output):
                return None
            return with_local_shape(schema, output, output.tensor_meta, sizes.shape, sizes.stride)
        if not any(is_sharded(spec) for spec in inputs):
            return None
        if sizes.squeezed_dims:
            return squeezed_by_full_sizes(schema)
        return with_local_channels(schema, inputs[0], sizes.batch_channels_pixels)

    def _local_arguments_by_tables(
        self, schema: OpSchema, output: Any, inputs: Sequence[DTensorSpec]
    ) -> OpSchema | None:
        """Implements :meth:`_local_arguments` for operators that programs entered into PyTorch's tables."""
        adjusted = None
        if schema.op in self.op_to_shape_and_stride_idx and is_sharded(output):
            adjusted = self._adjust_shape_and_stride_args(output.tensor_meta, schema, output)
        adjust = _compat.scalar_adjuster(self, schema.op)
        if adjust is not None and any(is_sharded(spec) for spec in inputs):
            adjusted = adjust(list(inputs), adjusted or schema)
        return adjusted

    def _adjust_shape_and_stride_args(
        self, out_tensor_meta: TensorMeta, schema: OpSchema, spec: DTensorSpec
    ) -> OpSchema:
        if not all(isinstance(size, int) for size in out_tensor_meta.shape):  # symbols stay symbols
            adjusted: OpSchema = super()._adjust_shape_and_stride_args(out_tensor_meta, schema, spec)
            return adjusted
        places: Any = self.op_to_shape_and_stride_idx[schema.op]
        shape_place, stride_place = places if isinstance(places, tuple) else (places, None)
        return with_local_shape(schema, spec, out_tensor_meta, shape_place, stride_place)


class _Facts(NamedTuple):
    """Facts of an operator, whatever its arguments."""

    is_per_element: bool
    num_returns: int
    returns_one_tensor: bool
    sizes: _C.LocalSizeArgs | None


@functools.cache
def _facts_of(op: OpOverload) -> _Facts:
    returns = op._schema.returns
    return _Facts(
        _C.is_per_element(qualified_name(op)),
        len(returns),
        len(returns) == 1 and isinstance(returns[0].type, torch.TensorType),
        _C.local_size_args(op),
    )


def _returned(facts: _Facts, outputs: list[Any]) -> Any:
    if facts.returns_one_tensor:
        return outputs[0]
    if not facts.num_returns or all(spec is None for spec in outputs):  # of what is written, or none
        return None
    return tuple(outputs)


def _no_rule(op: OpOverload) -> str:
    near = ", ".join(_C.similar_ops(qualified_name(op)))
    return (
        f"funcol: the operator {qualified_name(op)} has no sharding rule. Operators with near names: {near}. "
        "Register one with ShardingPropagator.register_single_axis_rule(op, rule), or PyTorch's "
        "torch.distributed.tensor.experimental.register_sharding."
    )
