"""Lists of gradients and parameters on several meshes, or of DTensors beside plain tensors.

An operator on a list takes tensors of one mesh, or plain ones. Optimizers and the norms of
``torch.nn.utils.clip_grad`` sort their lists by device and dtype. Here they sort them by mesh, too, and the
norm over several meshes is a plain tensor, made of one norm a mesh. Each is reduced over its own mesh, as if
it were alone: nothing else communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad
from torch.utils import _foreach_utils

from .. import _C
from . import patching

_total_norm: Any = patching.copy_function(clip_grad._get_total_norm)


def _by_mesh(tensors: Iterable[Tensor | None]) -> dict[DeviceMesh | None, list[int]]:
    """Returns the places of ``tensors`` in their list, by mesh; ``None`` is the mesh of plain tensors."""
    places: dict[DeviceMesh | None, list[int]] = {}
    for place, tensor in enumerate(tensors):
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        places.setdefault(mesh, []).append(place)
    return places


def _is_mixed(tensors: list[Any]) -> bool:
    return not _C.are_on_one_mesh(tensors) and len(_by_mesh(tensors)) > 1


class _Kind(tuple[Any, ...]):
    """A device and a dtype, as a key that equals only itself."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _group_by_kind_and_mesh(tensorlistlist: list[list[Tensor | None]], with_indices: bool = False) -> Any:
    """Replaces ``torch.utils._foreach_utils._group_tensors_by_device_and_dtype``."""
    if torch.compiler.is_compiling() or not tensorlistlist or not _is_mixed(tensorlistlist[0]):
        return NotImplemented
    groups: dict[Any, Any] = {}
    stock = torch._C._group_tensors_by_device_and_dtype
    for kind, (lists, indices) in stock(tensorlistlist, with_indices).items():
        for places in _by_mesh(lists[0]).values():
            # Lists of optional tensors may be empty.
            parts = [[tensors[place] for place in places] if tensors else [] for tensors in lists]
            groups[_Kind(kind)] = (parts, [indices[place] for place in places] if indices else [])
    return groups


def _norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Any:
    """Replaces ``torch.nn.utils.get_total_norm``."""
    if torch.compiler.is_compiling() or isinstance(tensors, Tensor):
        return NotImplemented
    tensors = list(tensors)
    if not _is_mixed(tensors):
        return _total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    by_mesh = _by_mesh(tensors)
    for mesh in by_mesh:
        if mesh is not None and mesh.get_coordinate() is None:
            raise ValueError(
                f"get_total_norm: rank {mesh.get_rank()} does not belong to {mesh}, on which "
                f"{len(by_mesh[mesh])} of the tensors are, and has no part of their norm. Leave them out on "
                "this rank, and broadcast the norm from a rank of the mesh."
            )
    norms = []
    for places in by_mesh.values():
        norm = _total_norm([tensors[place] for place in places], norm_type, False, foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    # A norm of order 0 counts the tensors that are not zero: the counts add up.
    return _total_norm(norms, float(norm_type) or 1.0, error_if_nonfinite, foreach)


def install() -> Callable[[], None]:
    """Installs both functions, each unless a program has replaced PyTorch's. Returns the function that undoes
    it."""
    pairs = (
        (clip_grad._get_total_norm, _norm),
        (_foreach_utils._group_tensors_by_device_and_dtype, _group_by_kind_and_mesh),
    )
    return patching.install_all(
        partial(patching.replace, patching.own_function(theirs), ours) for theirs, ours in pairs
    )
