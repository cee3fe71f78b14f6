"""Functions of Python that C++ calls."""

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
def hand_over(name: Literal["make_spec"], function: Callable[..., DTensorSpec]) -> None:
    """Gives C++ a function of Python that it calls, under one of these names.

    ``make_spec(mesh, placements, order, shape, stride, dtype, strided_as_order)``: a spec of its parts.
    """

@overload
def hand_over(
    name: Literal["mesh_axes"],
    function: Callable[[DeviceMesh], tuple[list[int], list[str], list[int], int]],
) -> None:
    """(mesh): sizes and names of its axes, the sets of axes that have a group, devices a host."""

@overload
def hand_over(
    name: Literal["redistribution_target"],
    function: Callable[[DTensorSpec, DeviceMesh, tuple[Placement, ...], Any, Any], DTensorSpec],
) -> None:
    """(source, mesh, placements, shard order or None, dtype or None): where a tensor of ``source`` gets."""

@overload
def hand_over(
    name: Literal["axis_group"], function: Callable[[DeviceMesh, int], tuple[str, list[int]]]
) -> None:
    """(mesh, set of axes): name of the group along them, and the places of its ranks."""

@overload
def hand_over(
    name: Literal["mesh_pair"],
    function: Callable[[DeviceMesh, DeviceMesh], tuple[list[int], list[int], int, str | None, list[int]]],
) -> None:
    """(mesh, other mesh): ranks of both, this rank, name and ranks of a group of all of them."""

@overload
def hand_over(
    name: Literal["ranks_of_mesh"], function: Callable[[DeviceMesh], tuple[str, list[int]]]
) -> None:
    """(mesh): name of the default group, and the mesh's ranks in it; the last axis counts first."""

@overload
def hand_over(
    name: Literal["note_redistribution"],
    function: Callable[[Tensor, Any, Any, str, bool], AbstractContextManager[object]],
) -> None:
    """(local, source placements, target placements, trace, is_explicit)"""

@overload
def hand_over(
    name: Literal["apply_mask", "fill_mask"], function: Callable[[Any, Tensor, DeviceMesh, int], Tensor]
) -> None:
    """(mask partial, local, mesh, axis): what the partial makes of a local tensor."""

@overload
def hand_over(
    name: Literal["gradient_of_to_local"],
    function: Callable[[Tensor, DTensorSpec, tuple[Placement, ...] | None], DTensor],
) -> None:
    """(gradient, spec of the input, placements of its gradient)"""

@overload
def hand_over(
    name: Literal["gradient_of_from_local"],
    function: Callable[[DTensor, tuple[Placement, ...]], Tensor],
) -> None:
    """(gradient, placements of it)"""

@overload
def hand_over(
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
    """(gradient, spec of the input, dtypes that are sent and returned, async_op, model, max_bytes)"""
