"""Context parallelism: each rank has a part of the sequence, and attends to the keys of all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import funcol

WIDTH, BATCH, LENGTH = 8, 2, 16


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))


class Keys(nn.Module):
    """The keys, or values, of the full sequence."""

    def __init__(self, group: dist.ProcessGroup | None, fault: str | None) -> None:
        super().__init__()
        self.group = group
        self.fault = fault
        self.kept: Tensor | None = None

    def forward(self, part: Tensor) -> Tensor:
        if self.group is None:
            return part.clone()
        if self.fault == "stale_keys" and self.kept is not None:
            return self.kept
        if self.fault == "rotated_keys":
            ranks = dist.get_world_size(self.group)
            part = funcol.permute_tensor(part, [(rank + 1) % ranks for rank in range(ranks)], self.group)
        full = funcol.all_gather_tensor(part, 1, self.group)
        self.kept = full.detach()
        return full


class Attention(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None, fault: str | None) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.keys = Keys(group, fault)
        self.values = Keys(group, None)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.query(x) @ self.keys(self.key(x)).transpose(1, 2)
        return x + torch.softmax(weights, -1) @ self.values(self.value(x))


def gathered(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor]:
    """Keys and values are gathered. ``stale_keys``: the second batch has those of the first."""
    torch.manual_seed(0)
    group = None if mesh is None else mesh.get_group("cp")
    model = nn.Sequential(Attention(group, None), Attention(group, fault))
    total = torch.zeros(())
    for step in range(2):
        x = batch(step)
        if mesh is not None:
            x = x.chunk(mesh.size(), 1)[mesh.get_local_rank("cp")]
        loss = model(x).square().sum()
        loss.backward()
        total += loss.detach()
    if group is not None and fault != "weights_unreduced":
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
    return model, total


def zigzag(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor]:
    """Rank i has the chunks i and 2n - 1 - i of a sequence, as balanced causal attention wants it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = batch(0)
    if mesh is not None:
        chunks, rank = x.chunk(2 * mesh.size(), 1), mesh.get_local_rank("cp")
        x = torch.cat([chunks[rank], chunks[-1 - rank]], 1)
    loss = model(x).square().sum()
    loss.backward()
    if mesh is not None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("cp"))
    return model, loss
