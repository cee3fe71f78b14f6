"""Data and tensor parallelism by hand-written collectives, on plain tensors.

A program takes the name of a fault, or None for the correct program.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import funcol

WIDTH, HIDDEN, BATCH, LENGTH = 8, 16, 4, 6


def batch(size: int = BATCH) -> Tensor:
    return torch.randn(size, LENGTH, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def part(tensor: Tensor, mesh: DeviceMesh | None, axis: str, dim: int = 0) -> Tensor:
    """This rank's chunk along the axis; all of it without a mesh."""
    if mesh is None:
        return tensor
    rank, size = mesh.get_local_rank(axis), mesh[axis].size()
    return tensor.tensor_split(size, dim)[rank]


class CopyToRanks(torch.autograd.Function):
    """Gives every rank of the group its input, and adds the gradients of the ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SumOfRanks(torch.autograd.Function):
    """Adds what the ranks have, and gives each the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Mlp(nn.Module):
    """Two linear layers, cut by columns and by rows over ``tp``."""

    def __init__(self, mesh: DeviceMesh | None, fault: str | None) -> None:
        super().__init__()
        ranks = 1 if mesh is None else mesh["tp"].size()
        self.up = nn.Linear(WIDTH, HIDDEN // ranks)
        self.down = nn.Linear(HIDDEN // ranks, WIDTH, bias=fault == "bias_counted")
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.group = None if mesh is None else mesh.get_group("tp")
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return self.down(torch.relu(self.up(x))) + self.bias
        if self.fault != "input_gradient_unreduced":
            x = CopyToRanks.apply(x, self.group)
        y = self.down(torch.relu(self.up(x)))
        if self.fault != "output_unreduced":
            y = SumOfRanks.apply(y, self.group)
        if self.fault == "output_reduced_twice":
            y = SumOfRanks.apply(y, self.group)
        return y + self.bias


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh | None, fault: str | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp(mesh, fault)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh | None, fault: str | None) -> None:
        super().__init__()
        self.first = Block(mesh, None)
        self.second = Block(mesh, fault)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def tensor_parallel(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor]:
    """Blocks with cut MLPs over ``tp``; gradients are averaged over ``dp``."""
    torch.manual_seed(0)
    model = Model(mesh, fault)
    loss = model(part(batch(), mesh, "dp")).square().mean()
    loss.backward()
    if mesh is not None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
            parameter.grad /= mesh["dp"].size()
    return model, loss


class Mean(nn.Module):
    """A model of two layers for data parallelism over ``dp``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.one = nn.Linear(WIDTH, HIDDEN)
        self.two = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(self.norm(x))))


def data_parallel(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor, Any]:
    """Replicas over ``dp``, whose gradients are averaged by funcol's collectives."""
    torch.manual_seed(0)
    model = Mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = batch(7 if fault in ("uneven_mean", "uneven") else 8)
    if mesh is None:
        loss = model(x).square().sum() / x.numel()
        loss.backward()
        return model, loss, optimizer
    group, ranks = mesh.get_group("dp"), mesh["dp"].size()
    mine = part(x, mesh, "dp")
    if fault == "uneven_mean":
        mine = x[: x.shape[0] // ranks * ranks].chunk(ranks)[mesh.get_local_rank("dp")]
    loss = model(mine).square().sum() / x.numel()
    loss.backward()
    for name, parameter in model.named_parameters():
        if fault == "left_out" and name == "norm.bias":
            continue
        gradient = funcol.all_reduce(parameter.grad, "sum", group)
        if fault == "scaled" and name == "one.weight":
            gradient = gradient / ranks
        if fault == "rank_scaled" and name == "one.bias":
            gradient = gradient * (1 + 0.1 * mesh.get_local_rank("dp"))
        parameter.grad = funcol.wait_tensor(gradient)
        if fault == "missing" and name == "two.bias" and mesh.get_local_rank("dp") == 1:
            parameter.grad = None
    if fault == "stale_weight":
        optimizer.param_groups[0]["params"] = list(model.parameters())[1:]
    return model, loss, optimizer


def replicated_by_ddp(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor]:
    """Replicas that start with other weights. ``unsynchronized``: gradients stay those of a rank."""
    torch.manual_seed(0 if mesh is None else mesh.get_rank())
    model: nn.Module = Mean()
    if mesh is None:
        loss = model(batch(8)).square().mean()
        loss.backward()
        return model, loss
    model = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    with model.no_sync() if fault == "unsynchronized" else contextlib.nullcontext():
        loss = model(part(batch(8), mesh, "dp")).square().mean()
        loss.backward()
    return model, loss
