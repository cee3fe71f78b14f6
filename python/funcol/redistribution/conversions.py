"""``to_local`` and ``from_local`` of DTensors in any shard order; specs say where their gradients go.

Each is the other's gradient, so both are differentiable any number of times. C++ handles the plain ones, and
calls the functions here for gradients whose specs it does not read.

PyTorch counterparts: ``DTensor.to_local`` and ``DTensor.from_local`` with ``grad_placements``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._utils import ExplicitRedistributionContext, compute_global_tensor_info

from .. import _C
from .functions import redistribute, redistribute_in_python
from .local_redistribute import RedistributionOptions, make_dtensor, settled
from .specs import (
    copy_onto,
    dense_strides_like,
    has_own_order,
    meta_of,
    target_spec,
    with_nonnegative_dim,
    without_partials,
)


def to_local(dtensor: DTensor, gradient: DTensorSpec) -> Tensor:
    """Returns the local tensor of ``dtensor``; its gradient has the spec ``gradient``, which may lack a
    mesh."""
    if not (dtensor.requires_grad and torch.is_grad_enabled()):
        return settled(dtensor._local_tensor)
    local: Tensor = _C.dtensor_to_local(dtensor, gradient.placements)
    if local is not NotImplemented:
        return local
    spec = dtensor._spec
    return _ToLocal.apply(dtensor, copy_onto(gradient, spec.mesh), spec)  # type: ignore[no-any-return]


def to_local_in_order(dtensor: DTensor, placements: Sequence[Placement] | None) -> Tensor:
    """Returns the local tensor of ``dtensor``; its gradient has ``placements``, which cut in the order of
    ``dtensor``. By default the gradient is replicated where ``dtensor`` is partial."""
    gradient = _in_order_of(dtensor._spec, placements)
    return _ToLocal.apply(dtensor, gradient, _in_order_of(gradient))  # type: ignore[no-any-return]


def from_local(local: Tensor, spec: DTensorSpec, gradient: DTensorSpec, mesh: DeviceMesh) -> DTensor:
    """Returns the DTensor on ``mesh`` of which this rank has ``local``; its gradient is redistributed to
    ``gradient`` before ``local`` gets it. The specs may lack a mesh."""
    if not (local.requires_grad and torch.is_grad_enabled()):
        return make_dtensor(local, copy_onto(spec, mesh), requires_grad=False)
    shape, stride, _ = meta_of(spec)
    dtensor: DTensor = _C.dtensor_from_local(local, mesh, spec.placements, shape, stride, gradient.placements)
    if dtensor is not NotImplemented:
        return dtensor
    specs = [copy_onto(one, mesh) for one in (spec, gradient)]
    return _FromLocal.apply(local, *specs)  # type: ignore[no-any-return]


class _ToLocal(torch.autograd.Function):
    """The local tensor; its gradient has the spec ``gradient``, and that gradient's one the spec ``back``."""

    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, gradient: DTensorSpec, back: DTensorSpec) -> Tensor:
        ctx.set_materialize_grads(False)
        local = settled(dtensor._local_tensor)
        ctx.specs, ctx.stride = (gradient, back), local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None
        gradient, back = ctx.specs
        if grad.stride() != ctx.stride:
            grad = grad.contiguous()
            stride = dense_strides_like(grad, gradient.shape)
            gradient = copy_onto(gradient, gradient.mesh)
            gradient.tensor_meta = meta_of(gradient)._replace(stride=stride)
        return _FromLocal.apply(grad, gradient, back), None, None


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec, gradient: DTensorSpec) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.specs = spec, gradient
        return make_dtensor(local.detach(), _C.copy_spec(spec), requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:
        if grad is None:
            return None, None, None
        spec, target = ctx.specs
        order = target.shard_order if has_own_order(target) else None
        if grad._spec.placements != target.placements or order or has_own_order(grad._spec):
            grad = redistribute(grad, placements=target.placements, shard_order=order)
        return _ToLocal.apply(grad, spec, target), None, None


def _in_order_of(
    spec: DTensorSpec, placements: Sequence[Placement] | None = None, meta: TensorMeta | None = None
) -> DTensorSpec:
    """Returns a spec of ``placements`` (default: those of a gradient) in which axes that cut a dim in
    ``spec`` cut first, in its order."""
    meta = meta or meta_of(spec)
    chosen = without_partials(spec.placements) if placements is None else placements
    chosen = tuple(with_nonnegative_dim(one, len(meta.shape)) for one in chosen)
    before = {entry.tensor_dim: tuple(entry.mesh_dims) for entry in spec.shard_order}
    order = []
    for dim in range(len(meta.shape)):
        axes = [axis for axis, one in enumerate(chosen) if isinstance(one, Shard) and one.dim == dim]
        first = [axis for axis in before.get(dim, ()) if axis in axes]
        if axes:
            order.append(ShardOrderEntry(dim, (*first, *(axis for axis in axes if axis not in first))))
    return DTensorSpec(spec.mesh, chosen, tensor_meta=meta, shard_order=tuple(order))


# Functions that C++ calls


def gradient_of_to_local(
    gradient: Tensor, spec: DTensorSpec, placements: tuple[Placement, ...] | None
) -> DTensor:
    """Returns ``gradient``, of the local part of a tensor of ``spec``, as a gradient of that tensor."""
    _, stride = compute_global_tensor_info(gradient, spec.mesh, spec.placements)
    meta = TensorMeta(spec.shape, tuple(stride), gradient.dtype)
    if not has_own_order(spec):
        chosen = without_partials(spec.placements) if placements is None else placements
        return DTensor.from_local(gradient, spec.mesh, chosen, shape=meta.shape, stride=meta.stride)
    target = _in_order_of(spec, placements, meta)
    return _FromLocal.apply(gradient, target, _in_order_of(target))  # type: ignore[no-any-return]


def gradient_of_from_local(gradient: DTensor, placements: tuple[Placement, ...]) -> Tensor:
    """Redistributes ``gradient`` to ``placements`` in the default shard order. Returns its local part."""
    if gradient.placements != placements or has_own_order(gradient._spec):
        target = target_spec(gradient._spec, gradient.device_mesh, placements)
        ExplicitRedistributionContext.observe_redistribution(
            gradient._spec,
            target,
            "Implicit redistribution occurred in DTensor.from_local backward",  # type: ignore[arg-type]
        )
        options = RedistributionOptions(lenient=True)
        gradient = redistribute_in_python(gradient, None, placements, None, None, None, options)
    return gradient.to_local()


_C.register_callback("gradient_of_to_local", gradient_of_to_local)
_C.register_callback("gradient_of_from_local", gradient_of_from_local)
