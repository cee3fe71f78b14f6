"""Operators for which neither PyTorch nor funcol has a sharding rule: they run on replicated tensors.

Every rank then computes the full result. That is right for an operator that computes its results from its
arguments alone, and for one in place, whose tensor gets back its shards. It is not for one that draws random
numbers, sends to other ranks or writes to several tensors: these need a rule.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from ..sharding.keyword_tensors import RedistributingSchema
from ..sharding.op_schemas import all_specs_of, specs_by_keyword, with_replicated, with_specs
from . import view_writeback

_TAGS = torch.Tag
# Tags of operators whose results differ between ranks, or have sizes that arguments do not determine.
_NEEDS_RULE = {_TAGS.nondeterministic_seeded, _TAGS.dynamic_output_shape, _TAGS.inplace_view}


@functools.cache
def runs_replicated(op: OpOverload) -> bool:
    """Returns true if ``op`` is right on replicated tensors, whatever it computes."""
    schema = op._schema
    names = {argument.name for argument in schema.arguments}
    return (
        _NEEDS_RULE.isdisjoint(op.tags)
        and (not schema.is_mutable or view_writeback.writes_to_first(op))
        and sum(
            argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
        )
        <= 1
        and names.isdisjoint({"group", "group_name", "process_group"})
        and op.namespace != "funcol"
        and "c10d" not in op.namespace
        and not torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(),  # type: ignore[no-untyped-call]
            torch._C.DispatchKey.CompositeImplicitAutograd,  # PyTorch then runs its parts
        )
    )


def decide_replicated(op_schema: OpSchema, metas: Callable[[OpSchema], Any]) -> OutputSharding:
    """Decides to run the operator on replicated tensors. ``metas(op_schema)`` returns the ``TensorMeta`` of
    its results."""
    held = all_specs_of(op_schema)
    wanted = [
        with_replicated(spec, {axis for axis, one in enumerate(spec.placements) if not one.is_replicate()})
        for spec in held
    ]
    mesh = held[0].mesh
    if any(spec.mesh != mesh for spec in held):
        raise ValueError(f"funcol: {op_schema} got tensors of several meshes.")
    _warn_once(op_schema.op)
    moved = with_specs(op_schema, wanted)
    by_keyword = dict(specs_by_keyword(op_schema))
    if by_keyword:
        moved = RedistributingSchema.of(moved, by_keyword)
    if view_writeback.writes_to_first(op_schema.op):
        output: Any = held[0] if view_writeback.can_write_back(held[0]) else wanted[0]
    elif any("Tensor" in str(result.type) for result in op_schema.op._schema.returns):
        output = _specs_of(metas(op_schema), mesh)
    else:
        output = None
    moves = any(one is not other for one, other in zip(held, wanted, strict=True))
    return OutputSharding(output, moved if moves else None, needs_redistribute=moves)


def _specs_of(metas: Any, mesh: Any) -> Any:
    if isinstance(metas, TensorMeta):
        return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=metas)
    if isinstance(metas, (list, tuple)):
        return tuple(_specs_of(meta, mesh) for meta in metas)
    return None


_warned: set[OpOverload] = set()


def _warn_once(op: OpOverload) -> None:
    if op in _warned:
        return
    _warned.add(op)
    warnings.warn(
        f"funcol: {op} has no sharding rule: every rank runs it on replicated tensors. Register a rule with "
        "torch.distributed.tensor.experimental.register_sharding to run it on shards.",
        stacklevel=2,
    )
