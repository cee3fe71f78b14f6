"""FSDP2: wrapped blocks, with accumulated gradients, checkpointing, mixed precision and uneven shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH = 10  # uneven over four ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 14)
        self.down = nn.Linear(14, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model_of_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 3))


def batch(mesh: DeviceMesh | None, step: int = 0) -> Tensor:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
    return x if mesh is None else x.chunk(mesh.size())[mesh.get_rank()]


def wrapped(model: nn.Sequential, mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    for block in model[:2]:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor, Any]:
    """Returns a step of Adam on sharded blocks. ``unmanaged``: FSDP2 ignores a weight of the second."""
    model = model_of_blocks()
    if mesh is not None:
        left_out = {model[1].norm.weight} if fault == "unmanaged" else set()
        for block in model[:2]:
            fully_shard(block, mesh=mesh, ignored_params=left_out)
        fully_shard(model, mesh=mesh, ignored_params=left_out)
        if fault == "divided_too_little":
            model[0].set_gradient_divide_factor(1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss = model(batch(mesh)).square().mean()
    loss.backward()
    return model, loss, optimizer


def accumulated(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor]:
    """Returns gradients of three batches. ``unsynchronized``: they are never reduced and so never there."""
    model = model_of_blocks()
    if mesh is not None:
        wrapped(model, mesh)
    losses = []
    for step in range(3):
        if mesh is not None:
            model.set_requires_gradient_sync(step == 2 and fault != "unsynchronized")
        losses.append(model(batch(mesh, step)).square().mean() / 3)
        losses[-1].backward()
    return model, torch.stack(losses).sum().detach()


def checkpointed(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor]:
    """Blocks that repeat their forward pass. ``scaled_block``: the second scales what it returns."""
    model = model_of_blocks()
    if mesh is not None:
        if fault == "scaled_block":
            model[1].down.register_forward_hook(lambda module, args, output: output * mesh.size())
        for block in model[:2]:
            checkpoint(block)
        wrapped(model, mesh)
    loss = model(batch(mesh)).square().mean()
    loss.backward()
    return model, loss


def mixed(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor]:
    """Computes in bf16 and reduces in fp32. ``reduced_in_bf16``: gradients are reduced in bf16, too."""
    model = model_of_blocks()
    if mesh is not None:
        reduce_dtype = torch.bfloat16 if fault == "reduced_in_bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        wrapped(model, mesh, mp_policy=policy)
    loss = model(batch(mesh)).float().square().mean()
    loss.backward()
    return model, loss


def compiled(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor]:
    """Compiled blocks, compared at their borders. ``scaled_block``: the second returns too much."""
    model = model_of_blocks()
    if mesh is not None:
        if fault == "scaled_block":
            model[1].forward = lambda x: mesh.size() * Block.forward(model[1], x)
        for block in model[:2]:
            block.compile(backend="eager")
    loss = model(batch(mesh)).square().mean()
    loss.backward()
    if mesh is not None:
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= mesh.size()
    return model, loss
