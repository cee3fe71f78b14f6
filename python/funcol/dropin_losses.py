"""Means of losses over shards, where PyTorch's DTensor divides by what one rank holds.

The gradient of a mean is divided by the number of elements that the operator sees, which is a rank's own, and
means of shards of different lengths do not average to the mean. Both are sums, divided by the number of all
elements: nothing has to move.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from .sharding import _is_sharded, _uneven_axes

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


def put(handlers: dict[OpOverload, Handler]) -> Callable[[], None]:
    """Enters what ``handlers``, the dispatcher's, do not have yet, until what is returned is called."""
    ours = {op: handler for op, handler in _handlers().items() if op not in handlers}
    handlers.update(ours)

    def take() -> None:
        for op, handler in ours.items():
            if handlers.get(op) is handler:
                del handlers[op]

    return take


@functools.cache
def _handlers() -> dict[OpOverload, Handler]:
    return {**dict.fromkeys(_FORWARD, _loss), **dict.fromkeys(_BACKWARD, _gradient)}


def _loss(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = _called(op, args, kwargs)
    if call["reduction"] == _MEAN and any(_uneven_axes(spec) for spec in _specs(call)):
        return op(**{**call, "reduction": _SUM}) / _num_elements(call)
    return _dispatched(op, args, kwargs)


def _gradient(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = _called(op, args, kwargs)
    if call["reduction"] == _MEAN and any(_is_sharded(spec) for spec in _specs(call)):
        gradient = call["grad_output"] / _num_elements(call)
        return op(**{**call, "grad_output": gradient, "reduction": _SUM})
    return _dispatched(op, args, kwargs)


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
