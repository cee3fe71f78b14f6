"""Gradients of a DTensor's ``to_local`` and ``from_local``, whatever the order in which axes cut its dims.

C++ asks for them where it does not know what the specs hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._utils import ExplicitRedistributionContext, compute_global_tensor_info

from .. import _C
from .functions import redistribute, redistributed
from .moving import How, make_dtensor
from .targets import counted_from_0, gradient_target_spec, target_spec


def gradient_of_to_local(
    gradient: Tensor, spec: DTensorSpec, placements: tuple[Placement, ...] | None
) -> DTensor:
    """``gradient``, of the local part of a tensor of ``spec``, as a gradient of that tensor."""
    if placements is None:
        placements = tuple(Replicate() if one.is_partial() else one for one in spec.placements)
    _, stride = compute_global_tensor_info(gradient, spec.mesh, spec.placements)
    if not has_own_order(spec):
        return DTensor.from_local(gradient, spec.mesh, placements, shape=spec.shape, stride=tuple(stride))
    meta = TensorMeta(spec.shape, tuple(stride), gradient.dtype)
    result: DTensor = _FromLocalInOrder.apply(gradient, _in_order_of(spec, placements, meta))
    return result


def gradient_of_from_local(gradient: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    """The local part of ``gradient``, once it has ``placements`` and axes cut in the order of the mesh."""
    if gradient.placements != placements or has_own_order(gradient._spec):
        target = target_spec(gradient._spec, gradient.device_mesh, placements, None, None)
        ExplicitRedistributionContext.observe_redistribution(
            gradient._spec,
            target,
            "Implicit redistribution occurred in DTensor.from_local backward",  # type: ignore[arg-type]
        )
        gradient = redistributed(gradient, None, placements, None, None, None, How(lenient=True))
    return gradient.to_local()


def has_own_order(spec: DTensorSpec) -> bool:
    """Whether axes cut a dim in another order than that of the mesh, which ``from_local`` cannot say."""
    return any(tuple(entry.mesh_dims) != tuple(sorted(entry.mesh_dims)) for entry in spec.shard_order or ())


def _in_order_of(spec: DTensorSpec, placements: tuple[Placement, ...], meta: TensorMeta) -> DTensorSpec:
    """With ``placements``, the axes that cut a dim in ``spec`` first, in its order."""
    placements = tuple(counted_from_0(one, len(meta.shape)) for one in placements)
    before = {entry.tensor_dim: tuple(entry.mesh_dims) for entry in spec.shard_order}
    order = []
    for dim in range(len(meta.shape)):
        axes = [axis for axis, one in enumerate(placements) if isinstance(one, Shard) and one.dim == dim]
        first = [axis for axis in before.get(dim, ()) if axis in axes]
        if axes:
            order.append(ShardOrderEntry(dim, (*first, *(axis for axis in axes if axis not in first))))
    return DTensorSpec(spec.mesh, placements, tensor_meta=meta, shard_order=tuple(order))


class ToLocalInOrder(torch.autograd.Function):
    """``to_local`` of a DTensor whose axes cut in an order of its own."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, placements: tuple[Placement, ...] | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.spec, ctx.placements = dtensor._spec, placements
        local = dtensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None
        return gradient_of_to_local(gradient, ctx.spec, ctx.placements), None


class _FromLocalInOrder(torch.autograd.Function):
    """``from_local`` to a spec."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.spec = spec
        return make_dtensor(local.view_as(local), spec, requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> Any:
        if gradient is None:
            return None, None
        target = gradient_target_spec(gradient, ctx.spec, gradient.dtype)
        if gradient._spec != target:
            gradient = redistribute(gradient, placements=target.placements, shard_order=target.shard_order)
        return _local_of(gradient), None


def _local_of(dtensor: DTensor) -> Tensor:
    """The local part of ``dtensor``, with a gradient that follows the order in which its axes cut."""
    if not torch.compiler.is_compiling():
        local: Tensor = _C.dtensor_to_local(dtensor, None)
        if local is not NotImplemented:
            return local
    if has_own_order(dtensor._spec):
        return ToLocalInOrder.apply(dtensor, None)  # type: ignore[no-any-return]
    return dtensor.to_local()


_C.hand_over("gradient_of_to_local", gradient_of_to_local)
_C.hand_over("gradient_of_from_local", gradient_of_from_local)
