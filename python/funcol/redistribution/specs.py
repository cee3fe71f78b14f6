"""Functions that read and derive a ``DTensorSpec``, and copies of one that do not keep its mesh alive."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from .. import _C


def spec_of(mesh: DeviceMesh, placements: tuple[Placement, ...], full: Tensor) -> DTensorSpec:
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def spec_of_shape(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[Any], local: Tensor
) -> DTensorSpec:
    """Returns the spec of a full tensor of ``shape`` in the memory order of ``local``, a part of it."""
    meta = TensorMeta(torch.Size(shape), dense_strides_like(local, shape), local.dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def with_placements(spec: DTensorSpec, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensorSpec:
    """Returns the spec of the tensor of ``spec`` with other ``placements``, in the default shard order."""
    return DTensorSpec(mesh, placements, tensor_meta=meta_of(spec))


def meta_of(spec: DTensorSpec) -> TensorMeta:
    assert spec.tensor_meta is not None
    return spec.tensor_meta


def has_symbols(full: DTensorSpec | TensorMeta | Tensor) -> bool:
    return any(type(size) is not int for size in full.shape)


def has_own_order(spec: DTensorSpec | None) -> bool:
    """Returns true if axes cut a dim in an order other than that of the mesh, which placements do not
    show."""
    entries = () if spec is None else spec.shard_order or ()
    return any(list(axes) != sorted(axes) for _, axes in entries)


def is_shard(placement: Any) -> TypeGuard[Shard | _StridedShard]:
    """Returns true if ``placement`` cuts a dim, strided or not. In some PyTorch releases strided shards are
    not instances of ``Shard``."""
    return isinstance(placement, (Shard, _StridedShard))


def with_nonnegative_dim(placement: Placement, num_dims: int) -> Placement:
    """Returns ``placement`` with its dim counted from the front."""
    if isinstance(placement, _StridedShard) and placement.dim < 0:
        return _StridedShard(placement.dim + num_dims, split_factor=placement.split_factor)
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + num_dims)
    return placement


def without_partials(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Returns ``placements``, replicated where they are partial: those of a gradient, as in PyTorch."""
    return tuple(Replicate() if one.is_partial() else one for one in placements)


def dense_strides(shape: Sequence[Any], order: Sequence[Any] | None = None) -> tuple[Any, ...]:
    """Returns the strides of a dense tensor of ``shape`` whose dims lie in memory like those of a tensor with
    strides ``order`` (default: the last dim innermost)."""
    dims: Any = reversed(range(len(shape)))
    if order is not None:
        dims = sorted(dims, key=order.__getitem__)
    strides: list[Any] = [0] * len(shape)
    step: Any = 1
    for dim in dims:
        strides[dim] = step
        step = step * (max(shape[dim], 1) if isinstance(shape[dim], int) else shape[dim])
    return tuple(strides)


def dense_strides_like(tensor: Tensor, shape: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the :func:`dense_strides` of ``shape`` in the memory order of ``tensor``."""
    return dense_strides(shape, None if tensor.is_contiguous() else tensor.stride())


# Targets of redistributions


def target_spec(
    src: DTensorSpec,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...] | None = None,
    dtype: torch.dtype | None = None,
) -> DTensorSpec:
    """Returns the spec of a tensor of ``src`` after its redistribution; ``None`` keeps its ``dtype``."""
    meta = meta_of(src)
    return DTensorSpec(
        mesh,
        tuple(with_nonnegative_dim(placement, len(meta.shape)) for placement in placements),
        tensor_meta=TensorMeta(meta.shape, meta.stride, dtype or meta.dtype),
        shard_order=None if order is None else tuple(ShardOrderEntry(*entry) for entry in order),  # type: ignore[arg-type]
    )


def gradient_target_spec(grad: DTensor, target: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Returns the spec to which ``grad``, the gradient of a tensor of spec ``target``, is redistributed."""
    placements = gradient_placements(grad._spec.placements, target.placements)
    meta = TensorMeta(grad.shape, grad.stride(), dtype)
    return dataclasses.replace(target, placements=placements, tensor_meta=meta)


def gradient_spec(spec: DTensorSpec) -> DTensorSpec:
    """Returns the spec of a gradient of a tensor of ``spec``, replicated where ``spec`` is partial."""
    return dataclasses.replace(spec, placements=without_partials(spec.placements))


def gradient_placements(held: Sequence[Placement], target: Sequence[Placement]) -> tuple[Placement, ...]:
    """Returns the placements to which a gradient of placements ``held``, of a tensor of ``target``, moves.

    Where ``target`` is partial and ``held`` is not, it is replicated, which is cheaper for its users.
    """
    return tuple(
        Replicate() if wanted.is_partial() and not one.is_partial() else wanted
        for one, wanted in zip(held, target, strict=True)
    )


# Without their mesh


def copy_without_mesh(spec: DTensorSpec) -> DTensorSpec:
    """Returns a copy of ``spec`` without its mesh, for a cache, not for a program."""
    copied: DTensorSpec = _C.copy_spec(spec)
    vars(copied)["mesh"] = None  # bypasses DTensorSpec.__setattr__
    return copied


def copy_onto(spec: DTensorSpec, mesh: DeviceMesh) -> DTensorSpec:
    """Returns a copy of a cached spec on ``mesh``, for a program."""
    copied: DTensorSpec = _C.copy_spec(spec)
    vars(copied)["mesh"] = mesh
    return copied


def canonical(spec: DTensorSpec) -> DTensorSpec:
    """Returns one object, without its mesh, for all specs of a mesh that equal ``spec``, as long as it is
    kept: to tell specs apart by identity. Raises NotImplementedError for symbols and masks."""
    known: DTensorSpec = _C.canonical_spec(spec)
    return known


_C.register_callback("redistribution_target", target_spec)
