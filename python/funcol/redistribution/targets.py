"""Target specs of redistributions and of their gradients."""

from __future__ import annotations

import dataclasses

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

from .. import _C
from .specs import counted_from_0, meta_of


def target_spec(
    src: DTensorSpec,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...] | None,
    dtype: torch.dtype | None,
) -> DTensorSpec:
    """The spec of a tensor of ``src`` after its redistribution; ``dtype`` is its own if ``None``."""
    meta = meta_of(src)
    return DTensorSpec(
        mesh,
        tuple(counted_from_0(placement, len(meta.shape)) for placement in placements),
        tensor_meta=TensorMeta(meta.shape, meta.stride, dtype or meta.dtype),
        shard_order=None if order is None else tuple(ShardOrderEntry(*entry) for entry in order),  # type: ignore[arg-type]
    )


def gradient_target_spec(grad: DTensor, target: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """The spec to which ``grad``, the gradient of a tensor of spec ``target``, is redistributed.

    Where ``target`` is partial, a gradient that is not stays so, which is cheaper for its users.
    """
    placements = tuple(
        Replicate() if wanted.is_partial() and not held.is_partial() else wanted
        for held, wanted in zip(grad._spec.placements, target.placements, strict=True)
    )
    meta = TensorMeta(grad.shape, grad.stride(), dtype)
    return dataclasses.replace(target, placements=placements, tensor_meta=meta)


_C.hand_over("redistribution_target", target_spec)
