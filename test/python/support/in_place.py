"""The eight in-place collectives that a CommTensor may be handed to, with results known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from differential import sample
from torch import Tensor

Mark = Callable[[Tensor], Tensor]
# start(x, rank, world, mark) starts a collective on `x`, which has a multiple of `world` rows. It returns the
# outputs and the Work. It calls `mark` on each tensor that it hands to the collective.
Start = Callable[[Tensor, int, int, Mark], tuple[list[Tensor], Any]]


def _all_reduce(x: Tensor, rank: int, world: int, mark: Mark) -> tuple[list[Tensor], Any]:
    output = mark(x.clone())
    return [output], dist.all_reduce(output, async_op=True)


def _broadcast(x: Tensor, rank: int, world: int, mark: Mark) -> tuple[list[Tensor], Any]:
    output = mark(x.clone())
    return [output], dist.broadcast(output, world - 1, async_op=True)


def _all_gather(x: Tensor, rank: int, world: int, mark: Mark) -> tuple[list[Tensor], Any]:
    outputs = [mark(torch.zeros_like(x)) for _ in range(world)]
    return outputs, dist.all_gather(outputs, mark(x.clone()), async_op=True)


def _all_gather_into_tensor(x: Tensor, rank: int, world: int, mark: Mark) -> tuple[list[Tensor], Any]:
    output = mark(x.new_zeros(world * x.shape[0], *x.shape[1:]))
    return [output], dist.all_gather_into_tensor(output, mark(x.clone()), async_op=True)


def _reduce_scatter(x: Tensor, rank: int, world: int, mark: Mark) -> tuple[list[Tensor], Any]:
    output = mark(torch.zeros_like(x[: x.shape[0] // world]))
    shares = [mark(share.clone()) for share in x.tensor_split(world)]
    return [output], dist.reduce_scatter(output, shares, async_op=True)


def _reduce_scatter_tensor(x: Tensor, rank: int, world: int, mark: Mark) -> tuple[list[Tensor], Any]:
    output = mark(torch.zeros_like(x[: x.shape[0] // world]))
    return [output], dist.reduce_scatter_tensor(output, mark(x.clone()), async_op=True)


def _scatter(x: Tensor, rank: int, world: int, mark: Mark) -> tuple[list[Tensor], Any]:
    output = mark(torch.zeros_like(x[: x.shape[0] // world]))
    shares = [mark(share.clone()) for share in x.tensor_split(world)] if rank == world - 1 else None
    return [output], dist.scatter(output, shares, world - 1, async_op=True)


def _all_to_all(x: Tensor, rank: int, world: int, mark: Mark) -> tuple[list[Tensor], Any]:
    outputs = [mark(torch.zeros_like(share)) for share in x.tensor_split(world)]
    shares = [mark(share.clone()) for share in x.tensor_split(world)]
    return outputs, dist.all_to_all(outputs, shares, async_op=True)


STARTS: dict[str, Start] = {
    "_allgather_base_": _all_gather_into_tensor,
    "_reduce_scatter_base_": _reduce_scatter_tensor,
    "allgather_": _all_gather,
    "allreduce_": _all_reduce,
    "alltoall_": _all_to_all,
    "broadcast_": _broadcast,
    "reduce_scatter_": _reduce_scatter,
    "scatter_": _scatter,
}


def expected(name: str, rank: int, world: int, rows: int, first_seed: int = 0) -> list[Tensor]:
    """Returns the outputs on ``rank``, if every rank's input is ``own_input`` of the same arguments."""
    inputs = [own_input(other, world, rows, first_seed) for other in range(world)]
    total = torch.stack(inputs).sum(0)
    results: dict[str, list[Tensor]] = {
        "_allgather_base_": [torch.cat(inputs)],
        "_reduce_scatter_base_": [total.tensor_split(world)[rank]],
        "allgather_": inputs,
        "allreduce_": [total],
        "alltoall_": [other.tensor_split(world)[rank] for other in inputs],
        "broadcast_": [inputs[world - 1]],
        "reduce_scatter_": [total.tensor_split(world)[rank]],
        "scatter_": [inputs[world - 1].tensor_split(world)[rank]],
    }
    return results[name]


def own_input(rank: int, world: int, rows: int, first_seed: int = 0) -> Tensor:
    """Returns integers, so that sums do not depend on their order."""
    return sample(first_seed + rank, (rows * world, 3), torch.int64)


def is_supported(name: str) -> bool:
    """Returns true if the default group's backend has the collective; older gloo has no alltoall."""
    if name != "alltoall_":
        return True
    try:
        rank, world = dist.get_rank(), dist.get_world_size()
        STARTS[name](torch.zeros(world, 1), rank, world, lambda t: t)[1].wait()
    except RuntimeError as error:
        if "does not support alltoall" not in str(error):
            raise
        return False
    return True
