"""Results of PyTorch's ``local_map`` whose shards are uneven.

PyTorch assumes that shards are even, so that each rank gets a global shape of its own. If an input has uneven
shards on the axes that cut a result, the ranks here add up the sizes of their shards, by one collective of
one number per axis. Nothing communicates if all shards of the inputs are even.

PyTorch counterpart: ``torch.distributed.tensor.experimental.local_map``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..collectives.functions import all_reduce
from ..collectives.import_hooks import InstallOnImport
from ..local_map.regions import cuts_of, num_pieces, uneven_dims
from ..redistribution.meshes import simulates_ranks
from ..redistribution.specs import dense_strides_like, with_placements
from . import patching


def _install_into(func_map: Any) -> Callable[[], None]:
    own = patching.own_function(vars(func_map).get("_local_map_wrapped"))
    return patching.replace(own, functools.partial(_run_local_map, patching.copy_function(own)))


def _run_local_map(stock: Any, *given: Any, **kwargs: Any) -> Any:
    """Replaces ``_local_map_wrapped``; ``given`` are the function, its options, and then the arguments."""
    num_options = stock.__code__.co_argcount
    _, _, in_placements, *_ = given[:num_options]
    arguments = pytree.tree_leaves(given[num_options:])
    if torch.compiler.is_compiling() or simulates_ranks():
        return NotImplemented
    axes = _uneven_axes(arguments, in_placements)
    if not axes:
        return NotImplemented
    results = stock(*given, **kwargs)
    return pytree.tree_map_only(DTensor, functools.partial(_with_agreed_shape, axes=axes), results)


def _uneven_axes(arguments: list[Any], in_placements: Any) -> set[int]:
    """Returns the mesh axes on which a tensor among ``arguments`` has uneven shards: equal on all ranks."""
    specs = []
    for number, argument in enumerate(arguments):
        if isinstance(argument, DTensor):
            given = in_placements[number] if in_placements is not None else None
            spec = argument._spec
            specs.append(with_placements(spec, spec.mesh, tuple(given)) if given else spec)
    return {axis for dim in uneven_dims(specs) for axis in dim.axes}


def _with_agreed_shape(result: DTensor, axes: set[int]) -> DTensor:
    mesh, local = result.device_mesh, result.to_local()
    shape = list(local.shape)
    if mesh.get_coordinate() is None:
        return result
    for dim, cutting in cuts_of(result.placements).items():
        is_uneven = not axes.isdisjoint(cutting)
        shape[dim] = (
            _total(shape[dim], mesh, cutting) if is_uneven else shape[dim] * num_pieces(mesh, cutting)
        )
    if list(result.shape) == shape:
        return result
    stride = dense_strides_like(local, shape)
    return DTensor.from_local(
        local, mesh, result.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _total(size: int, mesh: DeviceMesh, axes: tuple[int, ...]) -> int:
    total = torch.tensor(size, device=mesh.device_type)
    for axis in axes:
        total = all_reduce(total, "sum", (mesh, axis))
    return int(total)


install = InstallOnImport("torch.distributed.tensor.experimental._func_map", _install_into).install
