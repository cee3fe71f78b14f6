"""Redistributions that autograd records, and their gradients: redistributions back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .. import _C
from .local_redistribute import How, make_dtensor
from .specs import meta_of


class Redistribute(torch.autograd.Function):
    """Each of ``dtensors`` under its spec of ``dsts``, sent as its dtype of ``sent_dtypes``, by default as it
    is; its gradient is sent as its dtype of ``backward_dtypes``, by default that of the tensor. It is its own
    gradient, so it is differentiable again."""

    @staticmethod
    def forward(
        ctx: Any,
        dsts: tuple[DTensorSpec, ...],
        how: How,
        sent_dtypes: tuple[torch.dtype | None, ...],
        backward_dtypes: tuple[torch.dtype | None, ...],
        is_explicit: bool,
        *dtensors: DTensor,
    ) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        held = [dtensor._local_tensor for dtensor in dtensors]
        ctx.srcs, ctx.dsts, ctx.how = [dtensor._spec for dtensor in dtensors], dsts, how
        ctx.dtypes = [local.dtype for local in held]
        ctx.backward_dtypes = [one or own for one, own in zip(backward_dtypes, ctx.dtypes, strict=True)]
        sent = [_as_dtype(local, dtype) for local, dtype in zip(held, sent_dtypes, strict=True)]
        moved = how.move(sent, ctx.srcs, dsts, is_explicit)
        results = tuple(
            make_dtensor(_as_dtype(local, dtype and meta_of(dst).dtype), dst, requires_grad=False)
            for local, dst, dtype in zip(moved, dsts, sent_dtypes, strict=True)
        )
        ctx.mark_non_differentiable(
            *(result for result, needed in zip(results, ctx.needs_input_grad[5:], strict=True) if not needed)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> Any:
        results: list[DTensor | None] = [None] * len(grads)
        given = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        if given:
            how = ctx.how.back(ctx.srcs[0], ctx.dsts[0])
            targets = [how.target_of_gradient(grad, ctx.srcs[i], ctx.dtypes[i]) for i, grad in given]
            dsts = tuple(dst for _, dst in targets)
            sent_dtypes = tuple(ctx.backward_dtypes[i] for i, _ in given)
            moved = Redistribute.apply(
                dsts, how, sent_dtypes, sent_dtypes, False, *(grad for grad, _ in targets)
            )
            for (i, _), result in zip(given, moved, strict=True):
                results[i] = result
        return None, None, None, None, None, *results


def _as_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype=dtype)


def redistributed(
    dtensor: DTensor,
    dst: DTensorSpec,
    how: How,
    sent_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    is_explicit: bool = True,
) -> DTensor:
    """``dtensor`` under ``dst``, on its own mesh, as :class:`Redistribute` has it."""
    [result] = Redistribute.apply((dst,), how, (sent_dtype,), (backward_dtype,), is_explicit, dtensor)
    return result  # type: ignore[no-any-return]


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
    how = How(async_op, model, max_bytes, lenient=True)
    gradient, dst = how.target_of_gradient(gradient, spec, result_dtype)
    return redistributed(gradient, dst, how, sent_dtype, sent_dtype, is_explicit=False)


_C.hand_over("gradient_of_redistribute", gradient_of_redistribute)
