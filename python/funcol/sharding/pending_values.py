"""Partial values that PyTorch's rules take as they are and the operator cannot: they are reduced first."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from .op_schemas import specs_of, uneven_axes, with_replicated, with_specs


def reduced_to_a_number(op_schema: OpSchema) -> OutputSharding:
    """``item()``: a value that is pending is reduced first; PyTorch gives each rank its own part of it."""
    (spec,) = specs_of(op_schema)
    pending = {axis for axis, placement in enumerate(spec.placements) if placement.is_partial()}
    if not pending:
        return OutputSharding(None, op_schema)
    wanted = with_specs(op_schema, [with_replicated(spec, pending)])
    return OutputSharding(None, wanted, needs_redistribute=True)


# Of numbers of either sign, the norm of an extreme is not the extreme of norms, as PyTorch has it.
NORMS = {
    torch.ops.aten.linalg_vector_norm.default,
    torch.ops.aten.linalg_vector_norm.out,
    torch.ops.aten.norm.Scalar,
    torch.ops.aten.norm.Scalar_out,
    torch.ops.aten._foreach_norm.Scalar,
}


def without_extremes(op_schema: OpSchema) -> OpSchema:
    """With replicated tensors for those that are partial maxima or minima."""
    specs = specs_of(op_schema)
    reduced = [
        with_replicated(spec, {axis for axis, old in enumerate(spec.placements) if _is_extreme(old)})
        for spec in specs
    ]
    is_same = all(new is old for new, old in zip(reduced, specs, strict=True))
    return op_schema if is_same else with_specs(op_schema, reduced)


def _is_extreme(placement: Any) -> bool:
    return isinstance(placement, Placement) and (placement.is_partial("max") or placement.is_partial("min"))


def evenly_averaged(op_schema: OpSchema, sharding: OutputSharding) -> OpSchema | None:
    """What ``op_schema`` has to become if ``sharding`` averages over ranks that do not hold as much: without
    the shards that do not divide. None if it does not.
    """
    outputs: Any = sharding.output_spec
    specs = [outputs] if isinstance(outputs, DTensorSpec) else list(outputs or ())
    averaged = {
        axis
        for spec in specs
        if isinstance(spec, DTensorSpec)
        for axis, placement in enumerate(spec.placements)
        if placement.is_partial("avg")
    }
    if not averaged:
        return None
    given = specs_of((sharding.redistribute_schema if sharding.needs_redistribute else None) or op_schema)
    if not any(uneven_axes(spec) & averaged for spec in given):
        return None
    return with_specs(op_schema, [with_replicated(spec, uneven_axes(spec)) for spec in specs_of(op_schema)])
