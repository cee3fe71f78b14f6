"""PyTorch's sharding rules as C++ composes them: rows of one mesh axis, or the single strategy of a view."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor.placement_types import _StridedShard

from .. import _compat
from ..sharding.op_schemas import specs_in
from ..sharding.propagation import Row


class RefusedError(Exception):
    """PyTorch's propagator raises an error for the call."""


class AxisRule(NamedTuple):
    """The rule of a call for one mesh axis: rows of ``num_outputs`` outputs and ``num_inputs`` tensors."""

    rows: Sequence[Row]
    num_inputs: int
    split_factors: list[int]
    """For which shards ``_ShardingPlaceholder`` stands in the rows, in PyTorch's order."""
    allows_uneven: bool
    other_mesh_args: list[int]
    """Positions of tensors that may be on another mesh, where they stay."""
    even_dims: list[int]
    """Dims of the first tensor that have to be cut evenly."""
    accepts: Callable[[list[DTensorSpec], list[DTensorSpec | None]], bool] | None
    """PyTorch's filter, which returns true if it accepts the specs of tensors and outputs; ``None`` if there
    is none, or it requires ``even_dims``."""


class FullMeshRule(NamedTuple):
    """The single strategy of a call on the full mesh."""

    inputs: list[tuple[Placement, ...]]
    output: tuple[Placement, ...]


def rule_of(base: Any, op_schema: OpSchema, index: int | None) -> AxisRule | FullMeshRule | str:
    """Returns the rule that the propagator ``base`` has for a call, or for element ``index`` of its lists; if
    C++ cannot compose it, returns the reason."""
    info = getattr(base, "op_single_dim_strategy_funcs", {}).get(op_schema.op)
    strategy = base.op_strategy_funcs.get(op_schema.op)
    try:
        if info is not None:
            return _axis_rule(base, info, op_schema, index)
        if strategy is not None and _compat.has_single_strategy(strategy):
            return _full_mesh_rule(base, strategy, op_schema)
    except Exception:  # rules raise anything for calls that they refuse
        return "refused"
    return "rule"


def _axis_rule(base: Any, info: Any, op_schema: OpSchema, index: int | None) -> AxisRule:
    op, arguments = op_schema.op, op_schema.args_schema
    if index is not None:
        op = _compat.operator_of_elements(op)
        arguments = tuple(one[index] if _is_list_of_specs(one) else one for one in arguments)
    args = tuple(map(_meta_of, arguments))
    kwargs = {name: _meta_of(argument) for name, argument in op_schema.kwargs_schema.items()}
    function = getattr(info, "func", info)
    accepts = getattr(info, "full_mesh_strategy_filter", None)
    other_mesh_args = getattr(info, "different_mesh_args", None) or []
    even_dims = None if accepts is None else _compat.dims_cut_evenly(accepts, args)
    specs = specs_in((arguments, op_schema.kwargs_schema))
    return AxisRule(
        function(op, args, kwargs),
        len(specs),
        _split_factors(specs),
        bool(getattr(info, "allow_uneven_sharding", False)),
        [
            sum(isinstance(before, DTensorSpec) for before in arguments[:place])
            for place in other_mesh_args
            if place < len(arguments) and isinstance(arguments[place], DTensorSpec)
        ],
        even_dims or [],
        None if accepts is None or even_dims is not None else _filter(base, accepts, op_schema),
    )


def _filter(
    base: Any, accepts: Callable[..., bool], op_schema: OpSchema
) -> Callable[[list[DTensorSpec], list[DTensorSpec | None]], bool]:
    strategies: list[OpSchema] = []

    def accept(inputs: list[DTensorSpec], outputs: list[DTensorSpec | None]) -> bool:
        if not strategies:
            strategies.append(base._wrap_with_op_strategy(op_schema))
        is_tuple = len(outputs) > 1 or op_schema.return_type_list_tensor_like()
        given = tuple(outputs) if is_tuple else outputs[0]
        try:
            return accepts(inputs[0].mesh, strategies[0], inputs, given)
        except Exception as error:
            raise RefusedError from error

    return accept


def _full_mesh_rule(
    base: Any, strategy: Callable[[OpSchema], Any], op_schema: OpSchema
) -> FullMeshRule | str:
    strategies = strategy(base._wrap_with_op_strategy(op_schema))
    if not isinstance(strategies, OpStrategy) or len(strategies.strategies) != 1:
        return "rule"
    (only,) = strategies.strategies
    assert only.input_specs is not None
    return FullMeshRule([spec.placements for spec in only.input_specs], only.output_spec.placements)


def _is_list_of_specs(argument: Any) -> TypeGuard[Sequence[DTensorSpec]]:
    return (
        isinstance(argument, (list, tuple))
        and len(argument) > 0
        and all(isinstance(one, DTensorSpec) for one in argument)
    )


def _meta_of(argument: Any) -> Any:
    if isinstance(argument, DTensorSpec):
        return argument.tensor_meta
    if isinstance(argument, (list, tuple)):
        metas = [_meta_of(one) for one in argument]
        return tuple(metas) if _is_list_of_specs(argument) else type(argument)(metas)
    return argument


def _split_factors(specs: list[DTensorSpec]) -> list[int]:
    """Returns the split factors of the shards among the placements of all tensors; 1 for a plain shard.

    PyTorch takes them from a set of all placements, whose order decides ties. Partials are left out here:
    their hashes differ between ranks.
    """
    placements = {one for spec in specs for one in spec.placements if not one.is_partial()}
    factors = [
        int(one.split_factor) if isinstance(one, _StridedShard) else 1
        for one in placements
        if isinstance(one, (Shard, _StridedShard))
    ]
    return list(dict.fromkeys(factors))
