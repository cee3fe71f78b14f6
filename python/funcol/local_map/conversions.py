"""From DTensors to their local tensors and back, with the gradients where they are said to live.

Each is the other's gradient, so both are differentiable any number of times.

PyTorch counterparts: ``DTensor.to_local`` and ``DTensor.from_local`` with ``grad_placements``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .. import _C
from ..redistribution import local_gradients as local_gradients  # which C++ calls
from ..redistribution.functions import redistribute
from ..redistribution.meshless_specs import copy_onto
from ..redistribution.moving import make_dtensor, settled
from .regions import dense_strides, spec_of


def to_local(dtensor: DTensor, gradient: DTensorSpec) -> Tensor:
    """The local tensor of ``dtensor``; the gradient that comes back for it lives where ``gradient`` says."""
    if not (dtensor.requires_grad and torch.is_grad_enabled()):
        return settled(dtensor._local_tensor)
    local: Tensor = _C.dtensor_to_local(dtensor, gradient.placements)
    if local is not NotImplemented:
        return local
    return _ToLocal.apply(dtensor, copy_onto(gradient, dtensor._spec.mesh))  # type: ignore[no-any-return]


def from_local(local: Tensor, spec: DTensorSpec, gradient: DTensorSpec, mesh: DeviceMesh) -> DTensor:
    """The DTensor on ``mesh`` of which this rank has ``local``; its gradient goes where ``gradient`` says,
    and then to ``local``. The specs may be without a mesh."""
    if not (local.requires_grad and torch.is_grad_enabled()):
        return make_dtensor(local, copy_onto(spec, mesh), requires_grad=False)
    shape, stride, _ = meta_of(spec)
    dtensor: DTensor = _C.dtensor_from_local(local, mesh, spec.placements, shape, stride, gradient.placements)
    if dtensor is not NotImplemented:
        return dtensor
    specs = [copy_onto(one, mesh) for one in (spec, gradient)]
    return _FromLocal.apply(local, *specs)  # type: ignore[no-any-return]


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtensor: DTensor, gradient: DTensorSpec) -> Tensor:
        ctx.set_materialize_grads(False)
        local = settled(dtensor._local_tensor)
        ctx.specs, ctx.stride = (gradient, dtensor._spec), local.stride()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        gradient, spec = ctx.specs
        if grad.stride() != ctx.stride:
            grad = grad.contiguous()
            meta = meta_of(gradient)
            strides = dense_strides(grad, meta[0])
            gradient = spec_of(gradient.mesh, gradient.placements, meta[0], strides, meta[2])
        return from_local(grad, gradient, spec, gradient.mesh), None


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec, gradient: DTensorSpec) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.specs = gradient, spec
        return make_dtensor(local.detach(), _C.copy_spec(spec), requires_grad=local.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> Any:
        if grad is None:
            return None, None, None
        target, spec = ctx.specs
        if grad._spec.placements != target.placements:
            grad = redistribute(grad, placements=target.placements)
        return to_local(grad, spec), None, None


def meta_of(spec: DTensorSpec) -> tuple[Any, Any, torch.dtype]:
    meta = spec.tensor_meta
    assert meta is not None
    return meta.shape, meta.stride, meta.dtype
