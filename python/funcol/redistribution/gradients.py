"""Redistributions that autograd records, and their gradients: redistributions back."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .. import _C
from .local_redistribute import How, make_dtensor
from .specs import gradient_target_spec


class Redistribute(torch.autograd.Function):
    """``dtensor``, sent as ``sent_dtype``, under ``dst``, as ``result_dtype``; its gradient is sent as
    ``backward_dtype``. By default dtypes are that of the local tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        dtensor: DTensor,
        dst: DTensorSpec,
        sent_dtype: torch.dtype | None,
        result_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
        how: How,
        is_explicit: bool,
    ) -> DTensor:
        src, local = dtensor._spec, dtensor._local_tensor
        ctx.src, ctx.how = src, how
        ctx.dtypes = backward_dtype or local.dtype, local.dtype
        result = how.run(local.to(dtype=sent_dtype or local.dtype), src, dst, is_explicit)
        return make_dtensor(result.to(dtype=result_dtype or local.dtype), dst, dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        sent_dtype, result_dtype = ctx.dtypes
        return _gradient(grad, ctx.src, sent_dtype, result_dtype, ctx.how), None, None, None, None, None, None


def _gradient(
    grad: DTensor, target: DTensorSpec, sent_dtype: torch.dtype, result_dtype: torch.dtype, how: How
) -> DTensor:
    dst = gradient_target_spec(grad, target, result_dtype)
    return Redistribute.apply(  # type: ignore[no-any-return]
        grad, dst, sent_dtype, result_dtype, sent_dtype, how, False
    )


class RedistributeMany(torch.autograd.Function):
    """Each tensor under its spec of ``dsts``. It is its own gradient, so it is differentiable again."""

    @staticmethod
    def forward(
        ctx: Any, dsts: tuple[DTensorSpec, ...], how: How, is_explicit: bool, *dtensors: DTensor
    ) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.srcs, ctx.how = [dtensor._spec for dtensor in dtensors], how
        held = [dtensor._local_tensor for dtensor in dtensors]
        moved = how.run_batch(held, ctx.srcs, list(dsts), is_explicit)
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
    """``gradient`` of a tensor of ``spec``, redistributed to it and sent as ``sent_dtype``."""
    return _gradient(gradient, spec, sent_dtype, result_dtype, How(async_op, model, max_bytes, lenient=True))


_C.hand_over("gradient_of_redistribute", gradient_of_redistribute)
