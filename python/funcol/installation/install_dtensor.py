"""funcol under PyTorch's DTensor: :func:`funcol.install` calls :func:`install`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _api as stock_api
from torch.distributed.tensor import _collective_utils as stock_collectives
from torch.distributed.tensor import _random as stock_random
from torch.distributed.tensor import _redistribute as stock_redistribute
from torch.distributed.tensor import distribute_tensor as stock_distribute_tensor
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import utils as stock_ops
from torch.distributed.tensor._sharding_prop import ShardingPropagator as StockPropagator

from .. import _C, _compat
from . import (
    assigned_data,
    context_parallel,
    dtensor,
    exported_specs,
    local_maps,
    mixed_lists,
    native_operators,
    operators,
    patching,
    random_operators,
    tensor_parallel,
    user_patches,
)
from .propagation import InstalledPropagator

# The functions that this PyTorch release has, and their replacements.
_FUNCTIONS: list[tuple[Any, Callable[..., Any]]] = [
    (DTensor.to_local, dtensor.to_local),
    (DTensor.from_local, dtensor.from_local),
    (DTensor.redistribute, dtensor.redistribute),
    (DTensor.full_tensor, dtensor.full_tensor),
    (stock_distribute_tensor, dtensor.distribute_tensor),
    (stock_redistribute.redistribute_local_tensor, dtensor.redistribute_local_tensor),
    (stock_collectives.redistribute_cost, dtensor.redistribute_cost),
    (stock_ops.generate_redistribute_costs, dtensor.generate_redistribute_costs),
    (stock_api._dtensor_init_helper, random_operators.init_helper),
    (stock_random.manual_seed, random_operators.manual_seed),
    *(
        (theirs, getattr(dtensor, name))
        for name, theirs in _compat.dispatcher_functions().items()
        if theirs is not None
    ),
]

_PLACEMENTS: list[Any] = [Replicate, Shard, Partial]  # _StridedShard has a method in Python

_INLINED = {dtensor.to_local, dtensor.from_local, dtensor.redistribute, dtensor.full_tensor}


def replaced_functions() -> list[str]:
    """Returns the names of the functions and attributes of PyTorch that funcol replaces under DTensor."""
    own = [patching.own_function(theirs) or theirs for theirs, _ in _FUNCTIONS]
    names = [getattr(one, "__qualname__", patching.describe(one)) for one in own]
    return [*names, "OpDispatcher.sharding_propagator"]


def _install_comparisons() -> Callable[[], None]:
    """Makes specs compare and hash in C++, and placements compare, where no program has replaced the methods.
    Returns the function that undoes it."""
    undo = ExitStack()
    own = [DTensorSpec.__dict__[name] for name in ("__eq__", "__hash__")]
    if all(getattr(method, "__module__", None) == DTensorSpec.__module__ for method in own):
        for name, method in zip(("__eq__", "__hash__"), _C.spec_methods(DTensorSpec, *own), strict=True):
            undo.callback(patching.set_attribute(DTensorSpec, name, method))
    if not any("__eq__" in vars(one) for one in _PLACEMENTS):
        methods = _C.placement_methods(_PLACEMENTS, [one.__eq__ for one in _PLACEMENTS])
        for one, method in zip(_PLACEMENTS, methods, strict=True):
            undo.callback(patching.set_attribute(one, "__eq__", method))
    return undo.close


def install() -> Callable[[], None]:
    """Installs funcol under DTensor. Returns the function that undoes it."""
    with ExitStack() as undo:
        patches = [user_patches.bypassed_by_replacement(theirs) for theirs, _ in _FUNCTIONS]
        for (theirs, ours), bypassed in zip(_FUNCTIONS, patches, strict=True):
            if not bypassed:
                redirect = patching.inline if ours in _INLINED else patching.redirect
                undo.callback(redirect(theirs, ours))
        _install_propagator(DTensor._op_dispatcher, undo)
        parts = (
            operators,
            random_operators,
            assigned_data,
            mixed_lists,
            context_parallel,
            exported_specs,
            local_maps,
            tensor_parallel,
        )
        undo.callback(patching.install_all((*(part.install for part in parts), _install_comparisons)))
        return undo.pop_all().close


def _install_propagator(dispatcher: OpDispatcher, undo: ExitStack) -> None:
    theirs = dispatcher.sharding_propagator
    if type(theirs) is not StockPropagator or user_patches.in_propagator():
        return
    ours = InstalledPropagator(theirs)

    undo.callback(_compat.sort_candidate_placements(theirs))
    for forget in (_compat.forget_decisions, ours.cache_clear, ours._info_tables.undo):
        undo.callback(forget)
    undo.callback(patching.set_attribute(dispatcher, "sharding_propagator", ours))
    undo.callback(operators.install_convolutions(dispatcher, ours))
    undo.callback(native_operators.install(dispatcher, ours))
    _compat.forget_decisions()
