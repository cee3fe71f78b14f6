"""Redistributions that autograd records, and their gradients: redistributions back."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .. import _C
from .moving import How, make_dtensor
from .targets import gradient_target_spec


class Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dtensor: DTensor, dst: DTensorSpec, backward_dtype: torch.dtype | None, how: How
    ) -> DTensor:
        src, local = dtensor._spec, dtensor._local_tensor
        assert dst.tensor_meta is not None
        ctx.src, ctx.how = src, how
        ctx.backward_dtype = backward_dtype or local.dtype
        ctx.input_dtype = local.dtype
        result = how.run(local.to(dtype=dst.tensor_meta.dtype), src, dst, is_explicit=True)
        return make_dtensor(result, dst, dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        result = RedistributeGradient.apply(grad, ctx.src, ctx.backward_dtype, ctx.input_dtype, ctx.how)
        return result, None, None, None


class RedistributeGradient(torch.autograd.Function):
    """The way back, sent as ``sent_dtype``; an operation of its own, so that it is differentiable in turn."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: DTensor,
        target: DTensorSpec,
        sent_dtype: torch.dtype,
        result_dtype: torch.dtype,
        how: How,
    ) -> DTensor:
        ctx.src, ctx.sent_dtype, ctx.how = grad._spec, sent_dtype, how
        ctx.grad_dtype = grad._local_tensor.dtype
        dst = gradient_target_spec(grad, target, result_dtype)
        sent = grad._local_tensor.to(sent_dtype)
        result = how.run(sent, grad._spec, dst, is_explicit=False).to(result_dtype)
        return make_dtensor(result, dst, grad.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        result = RedistributeGradient.apply(grad, ctx.src, ctx.sent_dtype, ctx.grad_dtype, ctx.how)
        return result, None, None, None, None


class RedistributeMany(torch.autograd.Function):
    """Each tensor to its spec of ``dsts``; its own gradient, so that it is differentiable again."""

    @staticmethod
    def forward(
        ctx: Any, dsts: tuple[DTensorSpec, ...], how: How, is_explicit: bool, *dtensors: DTensor
    ) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.srcs, ctx.how = [dtensor._spec for dtensor in dtensors], how
        held = [dtensor._local_tensor for dtensor in dtensors]
        moved = how.run_many(held, ctx.srcs, list(dsts), is_explicit)
        results = tuple(
            make_dtensor(local, dst, requires_grad=False) for local, dst in zip(moved, dsts, strict=True)
        )
        ctx.mark_non_differentiable(
            *(result for result, needed in zip(results, ctx.needs_input_grad[3:], strict=True) if not needed)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> Any:
        results: list[DTensor | None] = [None] * len(grads)
        given = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        if given:
            dsts = tuple(gradient_target_spec(grad, ctx.srcs[i], grad.dtype) for i, grad in given)
            moved = RedistributeMany.apply(dsts, ctx.how, False, *(grad for _, grad in given))
            for (i, _), result in zip(given, moved, strict=True):
                results[i] = result
        return None, None, None, *results


def gradient_of_redistribute(
    gradient: DTensor,
    spec: DTensorSpec,
    sent_dtype: torch.dtype,
    result_dtype: torch.dtype,
    async_op: bool,
    model: _C.AlphaBeta | _C.StepCounts | None,
    max_bytes: int | None,
) -> DTensor:
    """``gradient`` where a tensor of ``spec`` was, sent as ``sent_dtype``."""
    how = How(async_op, model, max_bytes, lenient=True)
    result: DTensor = RedistributeGradient.apply(gradient, spec, sent_dtype, result_dtype, how)
    return result


_C.hand_over("gradient_of_redistribute", gradient_of_redistribute)
