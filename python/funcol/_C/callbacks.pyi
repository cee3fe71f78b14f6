"""Python functions that C++ calls."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .planner import AlphaBeta, StepCounts

@overload
def register_callback(name: Literal["make_spec"], function: Callable[..., DTensorSpec]) -> None:
    """Registers a Python function that C++ calls, under one of these names.

    ``make_spec(mesh, placements, order, shape, stride, dtype, strided_as_order)`` makes a spec of its parts.
    """

@overload
def register_callback(
    name: Literal["mesh_axes"],
    function: Callable[[DeviceMesh], tuple[list[int], list[str], list[int], int]],
) -> None:
    """Registers ``mesh_axes(mesh)``, which returns the sizes and names of the mesh's axes, the sets of axes
    that have a group, and the number of devices per host."""

@overload
def register_callback(
    name: Literal["redistribution_target"],
    function: Callable[[DTensorSpec, DeviceMesh, tuple[Placement, ...], Any, Any], DTensorSpec],
) -> None:
    """Registers ``redistribution_target(source, mesh, placements, shard order or None, dtype or None)``: the
    spec that a tensor of ``source`` gets."""

@overload
def register_callback(
    name: Literal["axis_group"], function: Callable[[DeviceMesh, int], tuple[str, list[int]]]
) -> None:
    """Registers ``axis_group(mesh, set of axes)``, which returns the name of the group along the axes, and
    the places of its ranks."""

@overload
def register_callback(
    name: Literal["mesh_pair"],
    function: Callable[[DeviceMesh, DeviceMesh], tuple[list[int], list[int], int, str | None, list[int]]],
) -> None:
    """Registers ``mesh_pair(mesh, other mesh)``, which returns the ranks of each mesh, this rank, and the
    name and ranks of a group that contains all of them."""

@overload
def register_callback(
    name: Literal["ranks_of_mesh"], function: Callable[[DeviceMesh], tuple[str, list[int]]]
) -> None:
    """Registers ``ranks_of_mesh(mesh)``, which returns the name of the default group, and the mesh's ranks in
    it, along the last axis first."""

@overload
def register_callback(
    name: Literal["note_redistribution"],
    function: Callable[[Tensor, Any, Any, str, bool], AbstractContextManager[object]],
) -> None:
    """Registers ``note_redistribution(local, source placements, target placements, trace, is_explicit)``."""

@overload
def register_callback(
    name: Literal["apply_mask", "fill_mask"], function: Callable[[Any, Tensor, DeviceMesh, int], Tensor]
) -> None:
    """Registers ``apply_mask(mask partial, local, mesh, axis)`` or ``fill_mask``, which takes the same: both
    return what the partial makes of the local tensor."""

@overload
def register_callback(
    name: Literal["gradient_of_to_local"],
    function: Callable[[Tensor, DTensorSpec, tuple[Placement, ...] | None], DTensor],
) -> None:
    """Registers ``gradient_of_to_local(gradient, spec of the input, placements of its gradient)``."""

@overload
def register_callback(
    name: Literal["gradient_of_from_local"],
    function: Callable[[DTensor, tuple[Placement, ...]], Tensor],
) -> None:
    """Registers ``gradient_of_from_local(gradient, placements of the gradient)``."""

@overload
def register_callback(
    name: Literal["gradient_of_redistribute"],
    function: Callable[
        [
            DTensor,
            DTensorSpec,
            torch.dtype,
            torch.dtype,
            bool,
            AlphaBeta | StepCounts | None,
            int | None,
        ],
        DTensor,
    ],
) -> None:
    """Registers ``gradient_of_redistribute(gradient, spec of the input, sent dtype, returned dtype, async_op,
    model, max_bytes)``."""
