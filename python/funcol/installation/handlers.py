"""Handlers of operators, entered in the table of DTensor's dispatcher and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from .patching import entered
from .view_writeback import writes_to_first

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def handlers() -> dict[OpOverload, Handler]:
    """The table of DTensor's dispatcher, whose handlers run operators in the place of the dispatcher."""
    table: Any = DTensor._op_dispatcher._custom_op_handlers
    return table  # type: ignore[no-any-return]


def enter(ours: Mapping[OpOverload, Handler]) -> Callable[[], None]:
    """Enters ``ours`` in the table. Returns the function that undoes it."""
    return entered(handlers(), ours)


def dispatched(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
