"""The collectives of ``raw_collectives.py`` with the gradient of the total over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import raw_collectives as raw
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ReduceOp

Collective = Callable[..., Any]


def differentiable(forward: Collective, backward: Collective) -> Collective:
    """Returns ``forward(x, *arguments)`` whose gradient is ``backward(gradient, *arguments)``."""

    class Differentiable(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
            ctx.arguments = arguments
            return forward(x, *arguments)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            arguments = ctx.arguments
            return (backward(grad, *arguments), *(None,) * len(arguments))

    return Differentiable.apply


def differentiable_list(forward: Collective, backward: Collective) -> Collective:
    """Returns ``forward(tensors, *arguments)`` as a function of ``(arguments, *tensors)``, with gradients."""

    class DifferentiableList(Function):
        @staticmethod
        def forward(ctx: Any, arguments: tuple[Any, ...], *xs: Tensor) -> Any:
            ctx.arguments = arguments
            return tuple(forward(list(xs), *arguments))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return (None, *backward(list(grads), *ctx.arguments))

    return DifferentiableList.apply


def differentiable_into(forward: Collective, backward: Collective) -> Collective:
    """Returns ``forward(out, x)`` as a function of ``(out, x, *arguments)``, the gradient's arguments."""

    class DifferentiableInto(Function):
        @staticmethod
        def forward(ctx: Any, out: Tensor, x: Tensor, *arguments: Any) -> Tensor:
            ctx.arguments = arguments
            ctx.mark_dirty(out)
            return forward(out, x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            arguments = ctx.arguments
            return (None, backward(grad, *arguments), *(None,) * len(arguments))

    return DifferentiableInto.apply


def differentiable_in_place(forward: Collective, backward: Collective) -> Collective:
    """Returns a function of ``x`` that calls ``forward(x)``, which starts a collective on it, and waits."""

    class DifferentiableInPlace(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            forward(x).wait()
            ctx.mark_dirty(x)
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return backward(grad)

    return DifferentiableInPlace.apply


class AllReduceMax(Function):
    """Shares the gradient between the ranks that hold the extremum, NaN included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = raw.all_reduce(x, ReduceOp.MAX)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, out = ctx.saved_tensors
        total = grad.clone()
        total_work = dist.all_reduce(total, async_op=True)
        holds = (x == out) | (x.isnan() & out.isnan())
        num_holders = holds.to(torch.float32)
        dist.all_reduce(num_holders, async_op=True).wait()
        total_work.wait()
        return torch.where(holds, total / num_holders, 0)


class AllGatherIntoList(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *outs: Tensor) -> Any:
        ctx.mark_dirty(*outs)
        return tuple(raw.all_gather_into_list(list(outs), x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        out = raw.reduce_scatter_list_into(torch.empty_like(grads[0]), list(grads))
        return out, *(None for _ in grads)


class ReduceScatterListInto(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *xs: Tensor) -> Tensor:
        ctx.num_ranks = len(xs)
        ctx.mark_dirty(out)
        return raw.reduce_scatter_list_into(out, list(xs))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *raw.all_gather_into_list([torch.empty_like(grad) for _ in range(ctx.num_ranks)], grad)


all_reduce = differentiable(raw.all_reduce, raw.all_reduce)
all_reduce_max = AllReduceMax.apply
all_gather = differentiable(raw.all_gather, raw.reduce_scatter)
reduce_scatter = differentiable(raw.reduce_scatter, raw.all_gather)
uneven_all_gather = differentiable(raw.uneven_all_gather, raw.uneven_reduce_scatter)
uneven_reduce_scatter = differentiable(raw.uneven_reduce_scatter, raw.uneven_all_gather)
all_to_all = differentiable(raw.all_to_all, lambda grad, received, sent: raw.all_to_all(grad, sent, received))
broadcast = differentiable(raw.broadcast, raw.reduce)
reduce = differentiable(raw.reduce, raw.broadcast)
scatter = differentiable(raw.scatter, raw.gather)
gather = differentiable(raw.gather, raw.scatter)

all_reduce_coalesced = differentiable_list(raw.all_reduce_coalesced, raw.all_reduce_coalesced)
all_gather_coalesced = differentiable_list(raw.all_gather_coalesced, raw.reduce_scatter_coalesced)
reduce_scatter_coalesced = differentiable_list(raw.reduce_scatter_coalesced, raw.all_gather_coalesced)

all_reduce_into = differentiable_in_place(lambda x: dist.all_reduce(x, async_op=True), raw.all_reduce)
broadcast_into = differentiable_in_place(lambda x: dist.broadcast(x, 0, async_op=True), raw.reduce)
all_gather_into = differentiable_into(raw.all_gather_into, raw.reduce_scatter)
reduce_scatter_into = differentiable_into(raw.reduce_scatter_into, raw.all_gather)
all_to_all_into = differentiable_into(raw.all_to_all_into, raw.all_to_all)
all_gather_into_list = AllGatherIntoList.apply
reduce_scatter_list_into = ReduceScatterListInto.apply
