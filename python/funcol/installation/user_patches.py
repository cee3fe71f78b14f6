"""Functions that programs put in the place of DTensor's before :func:`funcol.install`: they stay in effect.

A wrapper around a function that funcol replaces stays, and calls funcol's. funcol's function does in C++ the
work of other PyTorch functions, which it bypasses: if a program has replaced one of those, PyTorch's function
stays in place.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import _api, _collective_utils, _dispatch, _redistribute, placement_types
from torch.distributed.tensor import _sharding_prop as propagation

from . import patching

# Functions: the module that holds them, the one that defines them, beginnings of their names.
_Functions = list[tuple[Any, Any, tuple[str, ...]]]

# Functions that move data.
_TO_MOVE: _Functions = [
    (_redistribute, _redistribute, ("redistribute_local_tensor", "Redistribute.")),
    (_api, _redistribute, ("redistribute_local_tensor",)),
    (_dispatch, _redistribute, ("redistribute_local_tensor",)),
    (placement_types, placement_types, ("Shard._", "Partial._", "Replicate._", "_StridedShard._")),
    (
        _collective_utils,
        _collective_utils,
        ("fill_empty_tensor_to_shards", "mesh_", "pad_tensor", "shard_dim_alltoall", "unpad_tensor"),
    ),
]
_BYPASSED: dict[str, _Functions] = {
    "DTensor.from_local": [(_api, _api, ("_FromTorchTensor.",))],
    "DTensor.full_tensor": [*_TO_MOVE, (_api, _api, ("DTensor.redistribute", "_ToTorchTensor."))],
    "DTensor.redistribute": _TO_MOVE,
    "DTensor.to_local": [(_api, _api, ("_ToTorchTensor.",))],
    "OpDispatcher._dispatch_get_local_results_slow_path": _TO_MOVE,
    "distribute_tensor": _TO_MOVE,
    "redistribute_local_tensor": _TO_MOVE[3:],
}
_OF_DISPATCHER: _Functions = [
    (_dispatch, _dispatch, tuple(f"OpDispatcher.{begin}" for begin in ("_", "wrap", "unwrap", "redist")))
]
_OF_PROPAGATOR: _Functions = [(propagation, propagation, ("ShardingPropagator.",))]


def _find_patches(where: _Functions) -> dict[str, str]:
    found: dict[str, str] = {}
    for held_by, defined_in, beginnings in where:
        for name, codes in patching.codes_of(defined_in).items():
            if name.startswith(beginnings) and not name.endswith("__"):
                held = patching.find_function(held_by, name)
                if held is not None and not patching.has_code(held, codes):
                    found[f"{held_by.__name__.rpartition('.')[2]}.{name}"] = patching.describe(held)
    return found


def bypassed_by_replacement(function: Any) -> dict[str, str]:
    """Returns functions of programs that funcol's replacement of PyTorch's ``function`` would bypass."""
    own = patching.own_function(function)
    return {} if own is None else _find_patches(_BYPASSED.get(own.__qualname__, []))


def in_dispatcher() -> dict[str, str]:
    """Returns functions of programs that replace DTensor's dispatcher's methods, or what it moves data by."""
    return _find_patches([*_OF_DISPATCHER, *_TO_MOVE])


def in_propagator() -> dict[str, str]:
    """Returns functions of programs that replace methods of DTensor's propagator."""
    return _find_patches(_OF_PROPAGATOR)


def all_patches() -> dict[str, str]:
    """Returns functions of programs that replace functions of DTensor that funcol replaces or bypasses."""
    methods = [(_api, _api, tuple(name for name in _BYPASSED if name.startswith(("DTensor.", "dist"))))]
    return _find_patches([*methods, *_OF_DISPATCHER, *_TO_MOVE, *_OF_PROPAGATOR])
