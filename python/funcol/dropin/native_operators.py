"""DTensor's operators served in C++, before PyTorch's Python fallback is reached.

A decision is asked of the propagator once for calls that are alike, and then carried out in C++: arguments
move, the operator runs on local tensors, results become DTensors. PyTorch's own path serves the other calls:
those of subclasses, under modes, of operators with handlers, that draw random numbers on devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import _dispatch as stock_dispatch
from torch.distributed.tensor import _random as stock_random

from .. import _C, _compat
from . import kept, writes


def put(dispatcher: Any, propagator: Any) -> Callable[[], None]:
    """Serves the operators of ``dispatcher`` while it has ``propagator``. Returns the function that undoes
    it. In older minors nothing is served, see :func:`funcol._compat.serves_operators`."""
    if not _compat.serves_operators():
        return lambda: None

    def decide(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        info = dispatcher.unwrap_to_op_info(op, args, kwargs)
        if op in dispatcher._random_ops and stock_random.is_rng_supported_mesh(info.compute_mesh):
            return None  # PyTorch keeps each shard's offset into the random numbers
        return propagator.propagate_op_sharding(info.schema)

    def is_own() -> bool:
        return not kept.in_dispatcher()

    _C.put_native_operators(
        dispatcher,
        propagator,
        stock_dispatch.logger,
        vars(stock_random),
        writes.open_copies,
        decide,
        is_own,
    )
    return _C.take_native_operators
