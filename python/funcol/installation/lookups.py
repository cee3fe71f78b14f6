"""Lookups in a tensor whose rows are sharded: ``embedding`` and ``gather``, each rank for the rows it holds.

PyTorch's result has a placement with a mask, which its reduction applies and then drops: the result can be
reduced once, and other results of the same shapes have the same mask. Here the mask is applied to the result
at once, which makes it an ordinary partial sum, and belongs to the call.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _MaskPartial

from .. import _C


def look_up(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    sharding = info.output_sharding
    spec = sharding.output_spec
    masks = _masks_of_call(spec)
    if masks:
        schema = sharding.redistribute_schema
        arguments = tuple(_with(argument, masks) for argument in schema.args_schema)
        info.output_sharding = dataclasses.replace(
            sharding, redistribute_schema=dataclasses.replace(schema, args_schema=arguments)
        )
        spec = _with(spec, {mask: Partial(own.reduce_op) for mask, own in masks.items()})
    result = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    for own in masks.values():
        if own.mask_buffer.data is not None:  # a rank outside of the mesh has none
            own.mask_buffer.apply_mask(result)  # type: ignore[no-untyped-call]
    return dispatcher.wrap(result, spec)


def _masks_of_call(spec: Any) -> dict[Placement, _MaskPartial]:
    """Returns a new placement for each one in ``spec`` that has a mask."""
    placements = spec.placements if isinstance(spec, DTensorSpec) else ()
    return {
        placement: _MaskPartial(  # type: ignore[no-untyped-call]
            placement.reduce_op, offset_shape=placement.offset_shape, offset_dim=placement.offset_dim
        )
        for placement in placements
        if isinstance(placement, _MaskPartial)
    }


def _with(spec: Any, replaced: dict[Any, Any]) -> Any:
    """``spec`` with placements replaced; any other argument as it is."""
    if not isinstance(spec, DTensorSpec):
        return spec
    copied = _C.copy_spec(spec)
    copied.placements = tuple(replaced.get(placement, placement) for placement in spec.placements)
    return copied
