"""Convolutions of DTensors, while funcol is under DTensor.

PyTorch's handlers decide the placements of the results, but run on the local tensors as they are: with a
sharded kernel, sharded channels or a partial sum, they silently compute other numbers. The handlers here
redistribute arguments first, as for any operator. PyTorch still exchanges borders between ranks that each
hold a strip of the images.

PyTorch counterpart: ``torch.distributed.tensor._tp_conv``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._tp_conv import tp_convolution

from .. import _C
from ..redistribution.meshes import simulates_ranks
from ..sharding.propagation import ShardingPropagator, is_pytorch_tracing
from .operators import Handler, handlers
from .patching import entered

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def put(dispatcher: OpDispatcher, propagator: ShardingPropagator) -> Callable[[], None]:
    """Enters handlers of both operators, where PyTorch has handlers. Returns the function that undoes it."""
    theirs = handlers()
    ours = {op: _handler(dispatcher, propagator, theirs[op]) for op in (_FORWARD, _BACKWARD) if op in theirs}
    return entered(theirs, ours)


def _handler(dispatcher: OpDispatcher, propagator: ShardingPropagator, theirs: Handler) -> Handler:
    def convolve(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if dispatcher.sharding_propagator is not propagator or simulates_ranks():
            return theirs(op, args, kwargs)
        info = dispatcher.unwrap_to_op_info(op, args, kwargs)
        if info.compute_mesh.get_coordinate() is None:
            return theirs(op, args, kwargs)
        assert info.schema is not None
        if op is _FORWARD and _exchanges_borders(*args[:7]):
            base: Any = propagator._base
            spec = base.propagate_op_sharding(info.schema).output_spec
            if isinstance(spec, DTensorSpec) and spec.placements == args[0].placements:
                local = tp_convolution(op, tuple(info.local_args), info.local_kwargs, spec.dim_map)
                return dispatcher.wrap(local, _C.copy_spec(spec))
        remember = not is_pytorch_tracing()
        sharding = ShardingPropagator._propagate(propagator, info.schema, remember)
        if sharding.needs_redistribute:
            assert sharding.redistribute_schema is not None
            dispatcher.redistribute_local_args(
                info, sharding.redistribute_schema, sharding.use_val_from_redistribute_schema
            )
        return dispatcher.wrap(op(*info.local_args, **info.local_kwargs), sharding.output_spec)

    return convolve


def _exchanges_borders(
    images: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool
) -> bool:
    """Returns true if PyTorch's exchange of borders is right: for strips of equal width on the whole world,
    and windows that reach as far to the left as to the right, no farther than into the next strip.

    In older PyTorch releases, PyTorch's rule leads here. In newer ones it does not, and treats a strip as a
    whole image.
    """
    if not (isinstance(images, DTensor) and isinstance(weight, DTensor)) or transposed or images.dim() != 4:
        return False
    mesh = images.device_mesh
    width, kernel = images.shape[-1], weight.shape[-1]
    numbers = (width, kernel, *stride, *padding, *dilation)
    if mesh.ndim != 1 or mesh.size() < 2 or not all(type(number) is int for number in numbers):
        return False
    return (
        images.placements == (Shard(3),)
        and all(one is None or one.placements == (Replicate(),) for one in (weight, bias))
        and mesh.mesh.tolist() == list(range(dist.get_world_size()))
        and width % mesh.size() == 0
        and padding[-1] > 0
        and kernel == 2 * padding[-1] + 1
        and kernel // 2 <= width // mesh.size()
        and stride[-1] == dilation[-1] == 1
    )
