"""The reference's weights in the model of a parallel run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..redistribution.functions import redistribute
from .recording import plain_name


def share_weights(weights: Mapping[str, Tensor] | None, group: Any) -> dict[str, Tensor]:
    """Returns on all ranks, on the CPU, what rank 0 has in ``weights``."""
    listed: list[Any] = [[(name, one.shape, one.dtype) for name, one in (weights or {}).items()]]
    dist.broadcast_object_list(listed, src=0, group=group)
    shared = {}
    for name, shape, dtype in listed[0]:
        if weights is None:
            full = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            full = weights[name].cpu().contiguous()
        dist.broadcast(full, src=0, group=group)
        shared[name] = full
    return shared


@torch.no_grad()
def load_weights(root: nn.Module, weights: Mapping[str, Tensor], mesh: DeviceMesh) -> None:
    """Gives the parameters and buffers of ``root`` their part of ``weights``, by name, with no communication:
    stages of a pipeline come here at different times.

    DTensors get their shards. A plain tensor that is smaller in one dim gets the block of this rank on the
    last axis that cuts the dim to this size, unless it is made of other slices of the reference's than the
    first ones, which ranks of equal seeds draw alike: the program has cut it itself, and it is left as it is.
    """
    for name, held in (*root.named_parameters(), *root.named_buffers()):
        full = weights.get(plain_name(name))
        if full is None:
            continue
        full = full.to(held.to_local().device if isinstance(held, DTensor) else held.device, held.dtype)
        if held.shape != full.shape:
            block = None if isinstance(held, DTensor) else _block(held, full, mesh)
            if block is not None:
                held.copy_(block)
        elif isinstance(held, DTensor):
            whole = DTensor.from_local(
                full, held.device_mesh, [Replicate()] * held.device_mesh.ndim, run_check=False
            )
            held.to_local().copy_(redistribute(whole, placements=held.placements).to_local())
        else:
            held.copy_(full)


def _block(held: Tensor, full: Tensor, mesh: DeviceMesh) -> Tensor | None:
    """The part of ``full`` that ``held`` should have, or None if it should keep its own."""
    other = [d for d in range(full.ndim) if held.ndim == full.ndim and held.shape[d] != full.shape[d]]
    if len(other) != 1 or held.shape[other[0]] > full.shape[other[0]]:
        return None
    [dim] = other
    is_first = torch.equal(held, full.narrow(dim, 0, held.shape[dim]))
    if not is_first and bool(torch.isin(_digests(held, dim), _digests(full, dim)).all()):
        return None
    for axis in reversed(range(mesh.ndim)):
        rank, chunks = mesh.get_local_rank(axis), full.chunk(mesh.size(axis), dim)
        if rank < len(chunks) and chunks[rank].shape == held.shape:
            return chunks[rank]
    return None


def _digests(tensor: Tensor, dim: int) -> Tensor:
    """A number for each index of ``dim``, equal for equal slices."""
    rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).double()
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(rows.shape[1], generator=generator, dtype=torch.float64, device="cpu")
    return (rows * weights.to(rows.device)).sum(1)
