"""Handlers of operators that PyTorch's DTensor computes wrongly on shards.

Losses with ``reduction="mean"``: PyTorch's gradient is divided by the number of elements on this rank, and
the means of shards of different lengths do not average to the mean. The handlers compute sums and divide them
by the number of all elements, so that nothing is redistributed.

``argmax`` and ``argmin``: the first of equal extremes counts, which is not that of the first rank if another
dim than the first is sharded.

``__lshift__``, ``__and__`` and others of such names: PyTorch's dispatcher takes a name that ends in an
underscore for that of an operator in place, and returns the first argument.

``as_strided`` of a replicated tensor: PyTorch refuses all views that are not permutations.

``transpose_``, ``t_`` and ``unsqueeze_``: PyTorch refuses them, or keeps the placements of other dims.

``embedding`` and ``gather`` of a tensor whose rows are sharded, each rank for the rows it holds: PyTorch's
result has a placement with a mask, which its reduction applies and then drops: the result can be reduced
once, and other results of the same shapes have the same mask. Here the mask is applied to the result at once,
which makes it an ordinary partial sum, and belongs to the call.

Convolutions: PyTorch's handlers (``torch.distributed.tensor._tp_conv``) decide the placements of the results,
but run on the local tensors as they are: with a sharded kernel, sharded channels or a partial sum, they
silently compute other numbers. The handlers here redistribute arguments first, as for any operator. PyTorch
still exchanges borders between ranks that each hold a strip of the images.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._tp_conv import tp_convolution
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.utils._python_dispatch import return_and_correct_aliasing

from .. import _C
from ..redistribution.meshes import simulates_ranks
from ..sharding.op_schemas import is_sharded, uneven_axes
from ..sharding.propagation import ShardingPropagator, is_pytorch_tracing
from .patching import set_entries
from .view_writeback import overloads, writes_to_first

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]

aten = torch.ops.aten

_FORWARD = (
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.huber_loss.default,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
)
_BACKWARD = (
    aten.binary_cross_entropy_backward.default,
    aten.huber_loss_backward.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.soft_margin_loss_backward.default,
)
_MEAN, _SUM = 1, 2

# PyTorch's handlers of the operators here, while funcol's replace them.
_pytorch_handlers: dict[OpOverload, Handler] = {}


def handlers() -> dict[OpOverload, Handler]:
    """Returns the table of DTensor's dispatcher whose handlers run operators instead of the dispatcher."""
    table: Any = DTensor._op_dispatcher._custom_op_handlers
    return table  # type: ignore[no-any-return]


def install() -> Callable[[], None]:
    """Registers the handlers, except for operators that programs have given handlers. Returns the function
    that undoes it."""
    before = handlers()
    ours = {
        op: ours
        for op, ours in _HANDLERS.items()
        if op not in before or before[op].__module__.startswith("torch.")
    }
    _pytorch_handlers.update({op: before[op] for op in ours if op in before})
    undo = set_entries(before, ours)

    def remove() -> None:
        _pytorch_handlers.clear()
        undo()

    return remove


def dispatch(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``op`` as DTensor's dispatcher runs operators without a handler."""
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    if not writes_to_first(op):
        return dispatcher.wrap(results, info.output_sharding.output_spec)
    tail = getattr(dispatcher, "_dispatch_fast_path_python_tail", None)
    if tail is not None:
        takes_part = info.compute_mesh.get_coordinate() is not None
        tail(op, args, kwargs, info.compute_mesh, info.output_sharding, results, takes_part, True, False)
    return args[0]


def _loss(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = arguments_of(op, args, kwargs)
    if call["reduction"] == _MEAN and any(uneven_axes(spec) for spec in _specs(call)):
        return op(**{**call, "reduction": _SUM}) / _num_elements(call)
    return dispatch(op, args, kwargs)


def _loss_backward(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = arguments_of(op, args, kwargs)
    if call["reduction"] == _MEAN and any(is_sharded(spec) for spec in _specs(call)):
        gradient = call["grad_output"] / _num_elements(call)
        return op(**{**call, "grad_output": gradient, "reduction": _SUM})
    return dispatch(op, args, kwargs)


def _argmax_or_argmin(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = arguments_of(op, args, kwargs)
    (spec,) = _specs(call)
    axes = [axis for axis, placement in enumerate(spec.placements) if placement.is_shard()]
    in_order = all(spec.placements[axis].is_shard(0) for axis in axes) and len(axes) < 2
    theirs = _pytorch_handlers.get(op, dispatch)
    if axes and (_leaves_some_empty(spec) or (call["dim"] is None and not in_order)):
        return dispatch(op, args, kwargs)
    return theirs(op, args, kwargs)


def _as_strided(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = arguments_of(op, args, kwargs)["self"]
    is_replicated = all(placement.is_replicate() for placement in tensor.placements)
    if is_replicated and tensor._local_tensor.stride() == tensor.stride():
        return dispatch(op, args, kwargs)
    return _pytorch_handlers[op](op, args, kwargs)


def _leaves_some_empty(spec: Any) -> bool:
    """Returns true if some rank holds no element: the operator would raise on that rank alone."""
    return any(
        placement.is_shard()
        and -(-spec.shape[placement.dim] // spec.mesh.size(axis)) * (spec.mesh.size(axis) - 1)
        >= spec.shape[placement.dim]
        for axis, placement in enumerate(spec.placements)
    )


def arguments_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, defaults included; ``None`` for those without a value."""
    arguments = dict(_defaults(op))
    arguments.update(zip(arguments, args, strict=False))
    arguments.update(kwargs)
    return arguments


@functools.cache
def _defaults(op: OpOverload) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (one.name, one.default_value if one.has_default_value() else None) for one in op._schema.arguments
    )


def _specs(call: dict[str, Any]) -> list[Any]:
    return [value._spec for value in call.values() if isinstance(value, DTensor)]


def _num_elements(call: dict[str, Any]) -> int:
    """Returns the number of elements that a loss reduces, on all ranks together."""
    names = ("self", "target", "weight", "pos_weight")
    shapes = [call[name].shape for name in names if isinstance(call.get(name), torch.Tensor)]
    return int(torch.broadcast_shapes(*shapes).numel())  # type: ignore[no-untyped-call]


# Named as PyTorch's dispatcher takes operators in place to be named.
_NAMED_LIKE_IN_PLACE = overloads(aten.__and__, aten.__lshift__, aten.__or__, aten.__rshift__, aten.__xor__)


_VIEWS: dict[OpOverload, OpOverload] = {
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}


def _view_in_place(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes the tensor the view that the operator without the underscore returns."""
    held = args[0]
    view = _VIEWS[op](*args, **kwargs)
    held._local_tensor, held._spec = view._local_tensor, view._spec
    return return_and_correct_aliasing(op, args, kwargs, held)  # type: ignore[no-untyped-call]


def _embedding_or_gather(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    sharding = info.output_sharding
    spec = sharding.output_spec
    masks = _masks_of_call(spec)
    if masks:
        schema = sharding.redistribute_schema
        arguments = tuple(_with_placements(argument, masks) for argument in schema.args_schema)
        info.output_sharding = dataclasses.replace(
            sharding, redistribute_schema=dataclasses.replace(schema, args_schema=arguments)
        )
        spec = _with_placements(spec, {mask: Partial(own.reduce_op) for mask, own in masks.items()})
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


def _with_placements(spec: Any, replaced: dict[Any, Any]) -> Any:
    """Returns ``spec`` with placements replaced; any other argument as it is."""
    if not isinstance(spec, DTensorSpec):
        return spec
    copied = _C.copy_spec(spec)
    copied.placements = tuple(replaced.get(placement, placement) for placement in spec.placements)
    return copied


_HANDLERS: dict[OpOverload, Handler] = {
    **dict.fromkeys(_VIEWS, _view_in_place),
    **dict.fromkeys(_NAMED_LIKE_IN_PLACE, dispatch),
    aten.as_strided.default: _as_strided,
    **dict.fromkeys(_FORWARD, _loss),
    **dict.fromkeys(_BACKWARD, _loss_backward),
    aten.argmax.default: _argmax_or_argmin,
    aten.argmin.default: _argmax_or_argmin,
    aten.embedding.default: _embedding_or_gather,
    aten.gather.default: _embedding_or_gather,
}


# Convolutions

_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def install_convolutions(dispatcher: OpDispatcher, propagator: ShardingPropagator) -> Callable[[], None]:
    """Registers handlers of both operators, if PyTorch has handlers. Returns the function that undoes it."""
    theirs = handlers()
    ours = {op: _convolution(dispatcher, propagator, theirs[op]) for op in _CONVOLUTIONS if op in theirs}
    return set_entries(theirs, ours)


def _convolution(dispatcher: OpDispatcher, propagator: ShardingPropagator, theirs: Handler) -> Handler:
    def convolve(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if dispatcher.sharding_propagator is not propagator or simulates_ranks():
            return theirs(op, args, kwargs)
        info = dispatcher.unwrap_to_op_info(op, args, kwargs)
        if info.compute_mesh.get_coordinate() is None:
            return theirs(op, args, kwargs)
        assert info.schema is not None
        if op is aten.convolution.default and _exchanges_borders(*args[:7]):
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
    full image.
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
