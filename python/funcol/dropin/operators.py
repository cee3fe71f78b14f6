"""Handlers of operators whose results on shards are not what PyTorch's DTensor makes of them.

Means of losses: their gradient is divided by the number of elements that the operator sees, which is a rank's
own, and means of shards of different lengths do not average to the mean. Both are sums, divided by the number
of all elements: nothing has to move.

The place of an extreme: of several, the first one counts, which the order of the ranks does not tell once
dims other than the first are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from ..sharding.op_schemas import is_sharded, uneven_axes

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

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


# PyTorch's own, where ours are.
_theirs: dict[OpOverload, Handler] = {}


def put(handlers: dict[OpOverload, Handler]) -> Callable[[], None]:
    """Enters operators in ``handlers``, the dispatcher's, until what is returned is called. What programs
    have entered there stays."""
    before = {op: handlers.get(op) for op in _HANDLERS}
    ours = [op for op, theirs in before.items() if theirs is None or _is_pytorchs(theirs)]
    for op in ours:
        theirs = before[op]
        if theirs is not None:
            _theirs[op] = theirs
        handlers[op] = _HANDLERS[op]

    def take() -> None:
        for op in ours:
            theirs = _theirs.pop(op, None)
            if handlers.get(op) is not _HANDLERS[op]:
                continue
            if theirs is None:
                del handlers[op]
            else:
                handlers[op] = theirs

    return take


def _is_pytorchs(handler: Handler) -> bool:
    return handler.__module__.startswith("torch.")


def _loss(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = _called(op, args, kwargs)
    if call["reduction"] == _MEAN and any(uneven_axes(spec) for spec in _specs(call)):
        return op(**{**call, "reduction": _SUM}) / _num_elements(call)
    return _dispatched(op, args, kwargs)


def _gradient(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = _called(op, args, kwargs)
    if call["reduction"] == _MEAN and any(is_sharded(spec) for spec in _specs(call)):
        gradient = call["grad_output"] / _num_elements(call)
        return op(**{**call, "grad_output": gradient, "reduction": _SUM})
    return _dispatched(op, args, kwargs)


def _place_of_extreme(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = _called(op, args, kwargs)
    (spec,) = _specs(call)
    axes = [axis for axis, placement in enumerate(spec.placements) if placement.is_shard()]
    in_order = all(spec.placements[axis].is_shard(0) for axis in axes) and len(axes) < 2
    theirs = _theirs.get(op, _dispatched)
    if axes and (_leaves_some_empty(spec) or (call["dim"] is None and not in_order)):
        return _dispatched(op, args, kwargs)
    return theirs(op, args, kwargs)


def _leaves_some_empty(spec: Any) -> bool:
    """Whether some rank holds nothing; an extreme of nothing is an error on that rank alone."""
    return any(
        placement.is_shard()
        and -(-spec.shape[placement.dim] // spec.mesh.size(axis)) * (spec.mesh.size(axis) - 1)
        >= spec.shape[placement.dim]
        for axis, placement in enumerate(spec.placements)
    )


def _called(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments by name."""
    arguments = op._schema.arguments
    given = {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}
    return {**defaults, **given, **kwargs}


def _specs(call: dict[str, Any]) -> list[Any]:
    return [value._spec for value in call.values() if isinstance(value, DTensor)]


def _num_elements(call: dict[str, Any]) -> int:
    """Of what is reduced."""
    names = ("self", "target", "weight", "pos_weight")
    shapes = [call[name].shape for name in names if isinstance(call.get(name), torch.Tensor)]
    return int(torch.broadcast_shapes(*shapes).numel())  # type: ignore[no-untyped-call]


def _dispatched(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As DTensor's dispatcher does what has no handler."""
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    dispatcher.sharding_propagator.propagate(info)
    results = dispatcher._dispatch_get_local_results_slow_path(op, args, info)
    return dispatcher.wrap(results, info.output_sharding.output_spec)


_HANDLERS: dict[OpOverload, Handler] = {
    **dict.fromkeys(_FORWARD, _loss),
    **dict.fromkeys(_BACKWARD, _gradient),
    aten.argmax.default: _place_of_extreme,
    aten.argmin.default: _place_of_extreme,
}
