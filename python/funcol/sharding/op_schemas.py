"""Schemas of operator calls: the specs in them, by position and keyword, and schemas with other specs, or
with this rank's sizes in the place of full ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from .. import _C
from ..redistribution.local_redistribute import axes_with_own_rules
from ..redistribution.specs import dense_strides, is_shard


def specs_of(op_schema: OpSchema) -> list[DTensorSpec]:
    """Returns the specs of the positional tensors."""
    return specs_in(op_schema.args_schema)


def all_specs_of(op_schema: OpSchema) -> list[DTensorSpec]:
    """Returns the specs of the positional tensors, then those of keyword tensors."""
    return specs_in((op_schema.args_schema, op_schema.kwargs_schema))


def specs_in(arguments: Any) -> list[DTensorSpec]:
    """Returns the specs among ``arguments``, which may be nested."""
    if isinstance(arguments, DTensorSpec):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if not isinstance(arguments, (list, tuple)):
        return []
    return [spec for one in arguments for spec in specs_in(one)]


def specs_by_keyword(op_schema: OpSchema) -> Iterator[tuple[str, DTensorSpec]]:
    return (item for item in read_by_keyword(op_schema) if isinstance(item[1], DTensorSpec))


def read_by_keyword(op_schema: OpSchema) -> Iterator[tuple[str, Any]]:
    """Yields keyword arguments, without those of ``out=``, in the order of the operator's schema."""
    given = op_schema.kwargs_schema
    if given:
        for argument in op_schema.op._schema.arguments:
            if argument.name in given and not argument.is_out:
                yield argument.name, given[argument.name]


def with_specs(op_schema: OpSchema, specs: Sequence[Any]) -> OpSchema:
    """Returns ``op_schema`` with other ``specs``: those of positional tensors, then those of keyword tensors,
    which may be left out."""
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
    """Returns ``spec`` replicated along ``axes``; ``spec`` itself if there are none."""
    if not axes:
        return spec
    placements = tuple(Replicate() if axis in axes else old for axis, old in enumerate(spec.placements))
    if not any(is_shard(spec.placements[axis]) for axis in axes):  # the other axes cut as before
        replicated: DTensorSpec = _C.copy_spec(spec)
        replicated.placements = placements
        return replicated
    return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)


def specs_of_elements(op_schema: OpSchema, elements: list[Any]) -> list[Any]:
    """Returns the specs of all tensors of ``op_schema`` in order, from those of its lists' elements."""
    rest = [iter(element[1]) for element in elements]
    specs: list[Any] = []
    for argument in (*op_schema.args_schema, *(value for _, value in read_by_keyword(op_schema))):
        if isinstance(argument, DTensorSpec):  # the same for each element
            specs.append([next(inputs) for inputs in rest][-1])
        elif isinstance(argument, (list, tuple)) and any(isinstance(spec, DTensorSpec) for spec in argument):
            specs.extend(next(inputs) for inputs in rest)
    return specs


def with_local_shape(
    schema: OpSchema, output: Any, meta: TensorMeta, shape_place: int, stride_place: int | None
) -> OpSchema:
    """Returns ``schema`` with the local shape, and strides, of ``output``, whose full tensor has ``meta``."""
    shape = _C.local_shape_of(output, meta.shape)
    values: dict[int, Any] = {shape_place: shape}
    if stride_place is not None:
        values[stride_place] = dense_strides(shape, meta.stride)
    return _with_arguments(schema, values)


def with_local_channels(schema: OpSchema, images: DTensorSpec, places: Sequence[int]) -> OpSchema:
    """Returns ``schema`` with the numbers of images, channels and pixels that this rank holds."""
    assert images.tensor_meta is not None
    batch, channels, *pixels = _C.local_shape_of(images, images.tensor_meta.shape)
    return _with_arguments(schema, dict(zip(places, (batch, channels, math.prod(pixels)), strict=True)))


def squeezed_by_full_sizes(schema: OpSchema) -> OpSchema | None:
    """Returns ``schema`` squeezing only the dims whose full size is 1; ``None`` if this rank's sizes of the
    others are not 1 either."""
    packet: Any = schema.op.overloadpacket
    kwargs = dict(schema.kwargs_schema)
    source: Any = schema.args_schema[0]
    shape = source.tensor_meta.shape
    all_dims = range(len(shape))
    given: Any = schema.args_schema[1] if len(schema.args_schema) > 1 else kwargs.pop("dim", all_dims)
    dims = [all_dims[dim] for dim in ([given] if isinstance(given, int) else given)] if shape else []
    # A symbol is not a size of 1.
    local = _C.local_shape_of(source, [size if isinstance(size, int) else 0 for size in shape])
    if all(local[dim] != 1 or shape[dim] == 1 for dim in dims):
        return None
    variant = packet.dims_out if "out" in kwargs else packet.dims
    return OpSchema(variant, (source, tuple(dim for dim in dims if shape[dim] == 1)), kwargs)


def _with_arguments(schema: OpSchema, values: Mapping[int, Any]) -> OpSchema:
    """Returns ``schema`` with other arguments, by their position."""
    args, kwargs = list(schema.args_schema), dict(schema.kwargs_schema)
    for place, value in values.items():
        if place < len(args):
            args[place] = value
        else:
            kwargs[schema.op._schema.arguments[place].name] = value
    return OpSchema(schema.op, tuple(args), kwargs, schema_info=schema.schema_info)


def metas_of(argument: Any) -> Any:
    if isinstance(argument, DTensorSpec):
        return argument.tensor_meta
    if isinstance(argument, (list, tuple)):
        return type(argument)([metas_of(element) for element in argument])
    return argument


def partial_axes(spec: DTensorSpec) -> set[int]:
    """Returns the axes along which the tensor is partial."""
    return {axis for axis, placement in enumerate(spec.placements) if placement.is_partial()}


def is_sharded(spec: Any) -> bool:
    return isinstance(spec, DTensorSpec) and any(map(is_shard, spec.placements))


def uneven_axes(spec: DTensorSpec) -> set[int]:
    """Returns the axes along which shards are uneven."""
    assert spec.tensor_meta is not None
    return _C.uneven_axes(spec, spec.tensor_meta.shape)


def qualified_name(op: OpOverload) -> str:
    return str(op.name())  # type: ignore[no-untyped-call]


# Partial values that are reduced before an operator, where PyTorch's rules take them as they are


def decide_item(op_schema: OpSchema) -> OutputSharding:
    """Returns the decision for ``item()``: partials are reduced first. PyTorch returns each rank's part."""
    wanted = _replicated(op_schema, [partial_axes(spec) for spec in specs_of(op_schema)])
    return OutputSharding(None, wanted, needs_redistribute=wanted is not op_schema)


# The norm of a maximum or minimum is not that of the norms, as PyTorch assumes: signs differ.
NORMS = {
    torch.ops.aten.linalg_vector_norm.default,
    torch.ops.aten.linalg_vector_norm.out,
    torch.ops.aten.norm.Scalar,
    torch.ops.aten.norm.Scalar_out,
    torch.ops.aten._foreach_norm.Scalar,
}


def without_extremes(op_schema: OpSchema) -> OpSchema:
    """Returns ``op_schema`` with replicated tensors in the place of partial maxima and minima."""

    def extremes(spec: DTensorSpec) -> set[int]:
        return {
            axis for axis, one in enumerate(spec.placements) if one.is_partial("max") or one.is_partial("min")
        }

    return _replicated(op_schema, [extremes(spec) for spec in specs_of(op_schema)])


def without_own_rules(op_schema: OpSchema) -> OpSchema:
    """Returns ``op_schema`` with replicated tensors in the place of partials that funcol's rules do not know,
    such as norms. Raises ValueError if the operator writes to one of them."""
    axes = [set(axes_with_own_rules(spec.placements)) for spec in specs_of(op_schema)]
    writes_to_list = isinstance(op_schema.args_schema[0], (list, tuple))
    if any(axes) and op_schema.op._schema.is_mutable and (axes[0] or writes_to_list):
        raise ValueError(
            f"funcol: {op_schema} writes to a tensor that is pending. Redistribute it first, or use the "
            "operator that returns a new tensor."
        )
    return _replicated(op_schema, axes)


def _replicated(op_schema: OpSchema, axes: list[set[int]]) -> OpSchema:
    """Returns ``op_schema`` with each tensor replicated along its ``axes``; itself if there are none."""
    if not any(axes):
        return op_schema
    return with_specs(op_schema, list(map(with_replicated, specs_of(op_schema), axes)))


def without_uneven_averages(op_schema: OpSchema, sharding: OutputSharding) -> OpSchema | None:
    """Returns ``op_schema`` without uneven shards if ``sharding`` averages over such shards, else None."""
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
