"""DTensor's operators handled in C++, before PyTorch's Python fallback is reached.

The propagator decides once for equal calls, and C++ carries out the decision: arguments move, the operator
runs on local tensors, results become DTensors. PyTorch's own path handles the other calls: those of
subclasses, under modes, and of operators with handlers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import _dispatch as stock_dispatch
from torch.distributed.tensor import _random as stock_random
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .. import _C, _compat
from . import random_operators, user_patches, view_writeback
from .propagation import as_pytorch_error, is_shape_error


def install(dispatcher: Any, propagator: Any) -> Callable[[], None]:
    """Handles the operators of ``dispatcher`` while it has ``propagator``. Returns the function that undoes
    it."""

    def decide(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = _compat.schema_of_call(dispatcher, op, args, kwargs)
        try:
            return propagator.propagate_op_sharding_non_cached(schema)  # the call is remembered
        except Exception as error:
            if not is_shape_error(error):
                raise
            return as_pytorch_error(error, schema)

    def query_rule(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], index: int | None) -> Any:
        return propagator.rule_of(_compat.schema_of_call(dispatcher, op, args, kwargs), index)

    _C.install_native_operators(
        dispatcher,
        propagator,
        stock_dispatch.logger,
        view_writeback.open_copies,
        decide,
        draw,
        random_operators.dispatch,
        lambda: not user_patches.in_dispatcher(),
        query_rule,
        _compat.forget_decisions,
        *propagator.engine_and_rules(),
    )
    return _C.remove_native_operators


def draw(op: OpOverload, spec: DTensorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``op`` on local tensors so that it draws the random numbers of the shards of ``spec``, the spec of
    its first result. If funcol draws none, PyTorch does, with an offset for each shard.

    PyTorch counterpart: ``OpDispatcher._dispatch_get_local_results_slow_path``.
    """
    first = random_operators.first_tensor(args)
    if random_operators.draws(op, spec, first):
        return random_operators.draw(op, spec, args, kwargs)
    if not stock_random._rng_tracker and stock_random.is_rng_supported_mesh(spec.mesh):
        stock_random._rng_tracker = stock_random.OffsetBasedRNGTracker(spec.mesh, True)
    tracker: Any = stock_random._rng_tracker
    if not tracker or first.is_meta or not tracker.distribute_region_enabled:
        return op(*args, **kwargs)
    with tracker._distribute_region(spec):
        return op(*args, **kwargs)
