"""Functional collectives as a program writes them over ``torch.distributed``: the results are new tensors.

Each function starts the collective on tensors it allocates, waits, and returns them; inputs are not modified.
The group is the default one; a root is rank 0, this rank. ``raw_autograd.py`` adds gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn.functional import pad

Sizes = list[int]


def all_reduce(x: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
    out = x.clone()
    dist.all_reduce(out, op, async_op=True).wait()
    return out


def all_reduce_max(x: Tensor) -> Tensor:
    return all_reduce(x, ReduceOp.MAX)


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
