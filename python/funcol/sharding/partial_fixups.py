"""Partial values that are reduced before an operator, where PyTorch's rules take them as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from ..redistribution.local_redistribute import axes_with_own_rules
from .op_schemas import pending_axes, specs_of, uneven_axes, with_replicated, with_specs


def reduced_to_a_number(op_schema: OpSchema) -> OutputSharding:
    """The decision for ``item()``: partial values are reduced first. PyTorch gives each rank its own part."""
    wanted = _replicated(op_schema, [pending_axes(spec) for spec in specs_of(op_schema)])
    return OutputSharding(None, wanted, needs_redistribute=wanted is not op_schema)


# The norm of a maximum or minimum is not that of the norms, for which PyTorch takes it: signs differ.
NORMS = {
    torch.ops.aten.linalg_vector_norm.default,
    torch.ops.aten.linalg_vector_norm.out,
    torch.ops.aten.norm.Scalar,
    torch.ops.aten.norm.Scalar_out,
    torch.ops.aten._foreach_norm.Scalar,
}


def without_extremes(op_schema: OpSchema) -> OpSchema:
    """``op_schema`` with replicated tensors in the place of partial maxima and minima."""

    def extremes(spec: DTensorSpec) -> set[int]:
        return {
            axis for axis, one in enumerate(spec.placements) if one.is_partial("max") or one.is_partial("min")
        }

    return _replicated(op_schema, [extremes(spec) for spec in specs_of(op_schema)])


def without_own_rules(op_schema: OpSchema) -> OpSchema:
    """``op_schema`` with replicated tensors in the place of partials that funcol's rules do not know, such as
    norms. ``ValueError`` if the operator writes to one of them."""
    axes = [set(axes_with_own_rules(spec.placements)) for spec in specs_of(op_schema)]
    writes_to_list = isinstance(op_schema.args_schema[0], (list, tuple))
    if any(axes) and op_schema.op._schema.is_mutable and (axes[0] or writes_to_list):
        raise ValueError(
            f"funcol: {op_schema} writes to a tensor that is pending. Redistribute it first, or use the "
            "operator that returns a new tensor."
        )
    return _replicated(op_schema, axes)


def _replicated(op_schema: OpSchema, axes: list[set[int]]) -> OpSchema:
    """``op_schema`` with each tensor replicated along its ``axes``; itself if there are none."""
    if not any(axes):
        return op_schema
    return with_specs(op_schema, list(map(with_replicated, specs_of(op_schema), axes)))


def evenly_averaged(op_schema: OpSchema, sharding: OutputSharding) -> OpSchema | None:
    """``op_schema`` without uneven shards, if ``sharding`` averages over such shards; else ``None``."""
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
