"""Schemas of operator calls: the specs in them, by position and keyword, and schemas with other specs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._pytree import tree_leaves

from .. import _C
from ..redistribution.specs import is_shard


def specs_of(op_schema: OpSchema) -> list[DTensorSpec]:
    """The specs of the positional tensors."""
    return specs_in(op_schema.args_schema)


def specs_in(arguments: Any) -> list[DTensorSpec]:
    leaves = tree_leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, DTensorSpec))
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def specs_by_keyword(op_schema: OpSchema) -> Iterator[tuple[str, DTensorSpec]]:
    return (item for item in read_by_keyword(op_schema) if isinstance(item[1], DTensorSpec))


def read_by_keyword(op_schema: OpSchema) -> Iterator[tuple[str, Any]]:
    """Keyword arguments, without those of ``out=``, in the order of the operator's schema."""
    given = op_schema.kwargs_schema
    if given:
        for argument in op_schema.op._schema.arguments:
            if argument.name in given and not argument.is_out:
                yield argument.name, given[argument.name]


def with_specs(op_schema: OpSchema, specs: Sequence[Any]) -> OpSchema:
    """``op_schema`` with other ``specs``: those of positional tensors, then those of keyword tensors, which
    may be left out."""
    rest = iter(specs)

    def replace(argument: Any) -> Any:
        if isinstance(argument, DTensorSpec):
            return next(rest)
        if isinstance(argument, (list, tuple)):
            return type(argument)([replace(element) for element in argument])
        return argument

    args = tuple(replace(argument) for argument in op_schema.args_schema)
    kwargs = dict(op_schema.kwargs_schema)
    for name, value in read_by_keyword(op_schema):
        if isinstance(value, DTensorSpec):
            kwargs[name] = next(rest, value)
    return OpSchema(op_schema.op, args, kwargs, schema_info=op_schema.schema_info)


def with_replicated(spec: DTensorSpec, axes: set[int]) -> DTensorSpec:
    """``spec`` replicated along ``axes``; ``spec`` itself if there are none."""
    if not axes:
        return spec
    placements = tuple(Replicate() if axis in axes else old for axis, old in enumerate(spec.placements))
    if not any(is_shard(spec.placements[axis]) for axis in axes):  # the other axes cut as before
        replicated: DTensorSpec = _C.copy_spec(spec)
        replicated.placements = placements
        return replicated
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


def specs_of_elements(op_schema: OpSchema, elements: list[Any]) -> list[Any]:
    """The specs of all tensors of ``op_schema`` in their order, from those of each element of its lists."""
    rest = [iter(element[1]) for element in elements]
    specs: list[Any] = []
    for argument in (*op_schema.args_schema, *(value for _, value in read_by_keyword(op_schema))):
        if isinstance(argument, DTensorSpec):  # the same for each element
            specs.append([next(inputs) for inputs in rest][-1])
        elif isinstance(argument, (list, tuple)) and any(isinstance(spec, DTensorSpec) for spec in argument):
            specs.extend(next(inputs) for inputs in rest)
    return specs


def metas_of(argument: Any) -> Any:
    if isinstance(argument, DTensorSpec):
        return argument.tensor_meta
    if isinstance(argument, (list, tuple)):
        return type(argument)([metas_of(element) for element in argument])
    return argument


def is_sharded(spec: Any) -> bool:
    return isinstance(spec, DTensorSpec) and any(map(is_shard, spec.placements))


def uneven_axes(spec: DTensorSpec) -> set[int]:
    """The axes along which shards are uneven."""
    assert spec.tensor_meta is not None
    return _C.uneven_axes(spec, spec.tensor_meta.shape)


def qualified_name(op: OpOverload) -> str:
    return str(op.name())  # type: ignore[no-untyped-call]
