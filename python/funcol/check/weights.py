"""The reference's weights in the model of a parallel run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ..weights.state_dicts import load_full_state_dict
from .recording import plain_name


def load_weights(root: nn.Module, weights: Mapping[str, Tensor], mesh: DeviceMesh, group: Any) -> None:
    """Gives the parameters and buffers of ``root`` the values that rank 0 has in ``weights``, by name.

    DTensors get their shards. A plain tensor of another shape than the reference's is left as it is if it is
    made of the reference's slices along the dim in which it is smaller, and the ranks have them all; else it
    gets the block that the axis of this many ranks gives it.
    """
    held = {plain_name(name): one for name, one in (*root.named_parameters(), *root.named_buffers())}
    sharded = {name: one for name, one in held.items() if isinstance(one, DTensor)}
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(sharded), group=group)
    if sharded and all(one == names[0] for one in names):
        _load_sharded(sharded, weights)
        held = {name: one for name, one in held.items() if name not in sharded}
    sent: list[Any] = [[(name, one.shape, one.dtype) for name, one in weights.items()]]
    dist.broadcast_object_list(sent, src=0, group=group)
    for name, shape, dtype in sent[0]:
        if dist.get_rank() == 0:
            full = weights[name].cpu().contiguous()
        else:
            full = torch.empty(shape, dtype=dtype, device="cpu")
        if name in names[0] and all(one == names[0] for one in names):
            continue
        dist.broadcast(full, src=0, group=group)
        one = held.get(name)
        known = torch.zeros(sum(full.shape), device="cpu")
        dim = None if one is None or isinstance(one, DTensor) else _smaller_dim(one, full)
        if one is not None and dim is not None:
            rows = torch.isin(_digests(full, dim), _digests(one.detach().to("cpu", full.dtype), dim))
            known.narrow(0, sum(full.shape[:dim]), full.shape[dim]).copy_(rows)
        dist.all_reduce(known, dist.ReduceOp.MAX, group=group)
        if one is not None and (dim is None or not torch.split(known, list(full.shape))[dim].all()):
            _load(one, full, dim, mesh)


def _smaller_dim(held: Tensor, full: Tensor) -> int | None:
    """The one dim in which ``held`` is smaller."""
    if held.ndim != full.ndim:
        return None
    other = [d for d in range(full.ndim) if held.shape[d] != full.shape[d]]
    return other[0] if len(other) == 1 and held.shape[other[0]] < full.shape[other[0]] else None


def _load_sharded(sharded: Mapping[str, DTensor], weights: Mapping[str, Tensor]) -> None:
    holder = nn.Module()
    names = {f"t{i}": name for i, name in enumerate(sharded)}
    for (own, _), one in zip(names.items(), sharded.values(), strict=True):
        holder.register_buffer(own, one.detach())
    load_full_state_dict(holder, dict(weights) if dist.get_rank() == 0 else None, names=names, strict=False)


@torch.no_grad()
def _load(held: Tensor, full: Tensor, dim: int | None, mesh: DeviceMesh) -> None:
    if isinstance(held, DTensor):
        if held.shape == full.shape:
            placed = full.to(held.to_local().device, held.dtype)
            cut = distribute_tensor(placed, held.device_mesh, held.placements, src_data_rank=None)
            held.to_local().copy_(cut.to_local())
        return
    full = full.to(held.device, held.dtype)
    if held.shape == full.shape:
        held.copy_(full)
        return
    if dim is None:
        return
    for axis in reversed(range(mesh.ndim)):
        rank = mesh.get_local_rank(axis)
        chunks = full.chunk(mesh.size(axis), dim)
        if rank < len(chunks) and chunks[rank].shape == held.shape:
            held.copy_(chunks[rank])
            return


def _digests(tensor: Tensor, dim: int) -> Tensor:
    """A number for each index of ``dim``, equal for equal slices."""
    rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).double()
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(rows.shape[1], generator=generator, dtype=torch.float64, device="cpu")
    return (rows * weights.to(rows.device)).sum(1)
