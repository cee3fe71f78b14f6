"""Sizes among the arguments of operators, replaced by this rank's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema

from .. import _C
from ..redistribution.specs import dense_strides


def with_local_shape(
    schema: OpSchema, output: Any, meta: TensorMeta, shape_place: int, stride_place: int | None
) -> OpSchema:
    """``schema`` with the shape, and strides, of this rank's part of ``output``; ``meta`` is the whole's."""
    shape = _C.local_shape_of(output, meta.shape)
    values: dict[int, Any] = {shape_place: shape}
    if stride_place is not None:
        values[stride_place] = dense_strides(shape, meta.stride)
    return _with_arguments(schema, values)


def with_local_channels(schema: OpSchema, images: DTensorSpec, places: Sequence[int]) -> OpSchema:
    """``schema`` with the numbers of images, channels and pixels that this rank holds."""
    assert images.tensor_meta is not None
    batch, channels, *pixels = _C.local_shape_of(images, images.tensor_meta.shape)
    return _with_arguments(schema, dict(zip(places, (batch, channels, math.prod(pixels)), strict=True)))


def squeezed_as_a_whole(schema: OpSchema) -> OpSchema | None:
    """``schema`` squeezing the dims whose whole size is 1 alone; ``None`` if this rank's sizes of the others
    are not 1 either."""
    packet: Any = schema.op.overloadpacket
    kwargs = dict(schema.kwargs_schema)
    source: Any = schema.args_schema[0]
    shape = source.tensor_meta.shape
    every = range(len(shape))
    asked: Any = schema.args_schema[1] if len(schema.args_schema) > 1 else kwargs.pop("dim", every)
    dims = [every[dim] for dim in ([asked] if isinstance(asked, int) else asked)] if shape else []
    # A symbol stands for no size of 1.
    local = _C.local_shape_of(source, [size if isinstance(size, int) else 0 for size in shape])
    if all(local[dim] != 1 or shape[dim] == 1 for dim in dims):
        return None
    variant = packet.dims_out if "out" in kwargs else packet.dims
    return OpSchema(variant, (source, tuple(dim for dim in dims if shape[dim] == 1)), kwargs)


def _with_arguments(schema: OpSchema, values: Mapping[int, Any]) -> OpSchema:
    """``schema`` with other arguments, by their position."""
    args, kwargs = list(schema.args_schema), dict(schema.kwargs_schema)
    for place, value in values.items():
        if place < len(args):
            args[place] = value
        else:
            kwargs[schema.op._schema.arguments[place].name] = value
    return OpSchema(schema.op, tuple(args), kwargs, schema_info=schema.schema_info)
