"""Functional collectives as a program writes them over ``torch.distributed``: new tensors, and gradients.

Each function starts the collective on tensors it allocates, waits, and returns them; inputs are not modified.
The classes after them add the gradients of the total over all ranks. The group is the default one; a root is
rank 0, this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ReduceOp
from torch.nn.functional import pad

Sizes = list[int]


def all_reduce(x: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
    out = x.clone()
    dist.all_reduce(out, op, async_op=True).wait()
    return out


def all_gather(x: Tensor, num_ranks: int, dim: int = 0) -> Tensor:
    out = x.new_empty(num_ranks * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x, async_op=True).wait()
    return torch.cat(out.chunk(num_ranks), dim) if dim else out


def reduce_scatter(x: Tensor, num_ranks: int, dim: int = 0) -> Tensor:
    rank_major = torch.cat(x.chunk(num_ranks, dim)) if dim else x
    out = x.new_empty(rank_major.shape[0] // num_ranks, *rank_major.shape[1:])
    dist.reduce_scatter_tensor(out, rank_major, async_op=True).wait()
    return out


def uneven_all_gather(x: Tensor, sizes: Sizes) -> Tensor:
    largest = max(sizes)
    padded = pad(x, (0, 0, 0, largest - x.shape[0]))
    out = x.new_empty(len(sizes) * largest, *x.shape[1:])
    dist.all_gather_into_tensor(out, padded, async_op=True).wait()
    return torch.cat([part[:size] for part, size in zip(out.split(largest), sizes, strict=True)])


def uneven_reduce_scatter(x: Tensor, sizes: Sizes) -> Tensor:
    largest = max(sizes)
    rank_major = torch.cat([pad(part, (0, 0, 0, largest - len(part))) for part in x.split(sizes)])
    out = x.new_empty(largest, *x.shape[1:])
    dist.reduce_scatter_tensor(out, rank_major, async_op=True).wait()
    return out[: sizes[0]]


def all_to_all(x: Tensor, output_sizes: Sizes | None = None, input_sizes: Sizes | None = None) -> Tensor:
    out = torch.empty_like(x) if output_sizes is None else x.new_empty(sum(output_sizes), *x.shape[1:])
    dist.all_to_all_single(out, x, output_sizes, input_sizes, async_op=True).wait()
    return out


def broadcast(x: Tensor) -> Tensor:
    out = x.clone()
    dist.broadcast(out, 0, async_op=True).wait()
    return out


def reduce(x: Tensor) -> Tensor:
    out = x.clone()
    dist.reduce(out, 0, async_op=True).wait()
    return out


def scatter(x: Tensor, num_ranks: int) -> Tensor:
    out = x.new_empty(x.shape[0] // num_ranks, *x.shape[1:])
    dist.scatter(out, list(x.chunk(num_ranks)), 0, async_op=True).wait()
    return out


def gather(x: Tensor, num_ranks: int) -> Tensor:
    out = x.new_empty(num_ranks * x.shape[0], *x.shape[1:])
    dist.gather(x, list(out.chunk(num_ranks)), 0, async_op=True).wait()
    return out


# The methods of the group are cheaper than dist._coalescing_manager, and dist.all_reduce_coalesced warns.


def all_reduce_coalesced(xs: list[Tensor]) -> list[Tensor]:
    outs = [x.clone() for x in xs]
    dist.group.WORLD.allreduce_coalesced(outs).wait()
    return outs


def all_gather_coalesced(xs: list[Tensor], num_ranks: int) -> list[Tensor]:
    outs = [x.new_empty(num_ranks * x.shape[0], *x.shape[1:]) for x in xs]
    dist.group.WORLD.allgather_into_tensor_coalesced(outs, xs).wait()
    return outs


def reduce_scatter_coalesced(xs: list[Tensor], num_ranks: int) -> list[Tensor]:
    outs = [x.new_empty(x.shape[0] // num_ranks, *x.shape[1:]) for x in xs]
    dist.group.WORLD.reduce_scatter_tensor_coalesced(outs, xs).wait()
    return outs


class AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: Any) -> Tensor:
        ctx.op = op
        return all_reduce(x, op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.op), None


class AllReduceMax(Function):
    """Shares the gradient between the ranks that hold the extremum, NaN included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = all_reduce(x, ReduceOp.MAX)
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


class AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_ranks: int, dim: int) -> Tensor:
        ctx.arguments = num_ranks, dim
        return all_gather(x, num_ranks, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scatter(grad, *ctx.arguments), None, None


class ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_ranks: int, dim: int) -> Tensor:
        ctx.arguments = num_ranks, dim
        return reduce_scatter(x, num_ranks, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_gather(grad, *ctx.arguments), None, None


class UnevenAllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes) -> Tensor:
        ctx.sizes = sizes
        return uneven_all_gather(x, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return uneven_reduce_scatter(grad, ctx.sizes), None


class UnevenReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes) -> Tensor:
        ctx.sizes = sizes
        return uneven_reduce_scatter(x, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return uneven_all_gather(grad, ctx.sizes), None


class AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, output_sizes: Sizes | None, input_sizes: Sizes | None) -> Tensor:
        ctx.sizes = input_sizes, output_sizes
        return all_to_all(x, output_sizes, input_sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_to_all(grad, *ctx.sizes), None, None


class Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return broadcast(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce(grad)


class Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return broadcast(grad)


class Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return scatter(x, num_ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, ctx.num_ranks), None


class Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return gather(x, num_ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return scatter(grad, ctx.num_ranks), None


class AllReduceCoalesced(Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> Any:
        return tuple(all_reduce_coalesced(list(xs)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(all_reduce_coalesced(list(grads)))


class AllGatherCoalesced(Function):
    @staticmethod
    def forward(ctx: Any, num_ranks: int, *xs: Tensor) -> Any:
        ctx.num_ranks = num_ranks
        return tuple(all_gather_coalesced(list(xs), num_ranks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *reduce_scatter_coalesced(list(grads), ctx.num_ranks)


class ReduceScatterCoalesced(Function):
    @staticmethod
    def forward(ctx: Any, num_ranks: int, *xs: Tensor) -> Any:
        ctx.num_ranks = num_ranks
        return tuple(reduce_scatter_coalesced(list(xs), num_ranks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *all_gather_coalesced(list(grads), ctx.num_ranks)


# Into tensors of the caller.


def all_gather_into(out: Tensor, x: Tensor) -> Tensor:
    dist.all_gather_into_tensor(out, x, async_op=True).wait()
    return out


def reduce_scatter_into(out: Tensor, x: Tensor) -> Tensor:
    dist.reduce_scatter_tensor(out, x, async_op=True).wait()
    return out


def all_to_all_into(out: Tensor, x: Tensor) -> Tensor:
    dist.all_to_all_single(out, x, async_op=True).wait()
    return out


def all_gather_into_list(outs: list[Tensor], x: Tensor) -> list[Tensor]:
    dist.all_gather(outs, x, async_op=True).wait()
    return outs


def reduce_scatter_list_into(out: Tensor, xs: list[Tensor]) -> Tensor:
    dist.reduce_scatter(out, xs, async_op=True).wait()
    return out


class AllReduceInto(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x, async_op=True).wait()
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad)


class BroadcastInto(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.broadcast(x, 0, async_op=True).wait()
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce(grad)


class AllGatherInto(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        ctx.mark_dirty(out)
        return all_gather_into(out, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, reduce_scatter(grad, ctx.num_ranks), None


class ReduceScatterInto(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        ctx.mark_dirty(out)
        return reduce_scatter_into(out, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, all_gather(grad, ctx.num_ranks), None


class AllToAllInto(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        return all_to_all_into(out, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, all_to_all(grad)


class AllGatherIntoList(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *outs: Tensor) -> Any:
        ctx.mark_dirty(*outs)
        return tuple(all_gather_into_list(list(outs), x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        out = reduce_scatter_list_into(torch.empty_like(grads[0]), list(grads))
        return out, *(None for _ in grads)


class ReduceScatterListInto(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, *xs: Tensor) -> Tensor:
        ctx.num_ranks = len(xs)
        ctx.mark_dirty(out)
        return reduce_scatter_list_into(out, list(xs))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *all_gather_into_list([torch.empty_like(grad) for _ in range(ctx.num_ranks)], grad)
