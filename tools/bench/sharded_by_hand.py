"""The collectives and copies of FSDP2, written by hand with PyTorch's functions and the fewest hooks.

What it takes above the plain program is what a layer that gathers parameters and scatters gradients cannot
avoid; FSDP2 does more, and funcol under it.
"""

from __future__ import annotations

from typing import Any

import torch
from parallel_steps import BATCH, LENGTH, NUM_RANKS, WIDTH, Step, transformer
from torch import Tensor, nn
from torch import distributed as dist


class _Group:
    """The parameters of a block, cut along dim 0. Their whole values are views of one storage."""

    def __init__(self, block: nn.Module) -> None:
        params = list(block.parameters())
        self.lengths = [param.numel() // NUM_RANKS for param in params]
        self.length = sum(self.lengths)
        self.shards = [
            param.detach().view(-1)[:n].clone() for param, n in zip(params, self.lengths, strict=True)
        ]
        self.whole = torch.empty(self.length * NUM_RANKS)
        parts = self.whole.split([n * NUM_RANKS for n in self.lengths])
        self.rows = [part.view(NUM_RANKS, -1) for part in parts]
        self.params = params
        for param, part in zip(params, parts, strict=True):
            param.data = part.view(param.shape)
        self.grads: tuple[Tensor, ...] = ()

    def gather(self) -> None:
        gathered = torch.empty(self.length * NUM_RANKS)
        sent = gathered[: self.length]
        torch.cat(self.shards, out=sent)
        dist.group.WORLD._allgather_base(gathered, sent)
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        with torch.no_grad():
            torch.split_with_sizes_copy(gathered.view(NUM_RANKS, -1), self.lengths, 1, out=self.rows)

    def free(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def scatter_gradients(self) -> None:
        self.free()
        sent = torch.empty(NUM_RANKS, self.length)
        torch._chunk_cat([param.grad for param in self.params], 0, NUM_RANKS, out=sent)
        for param in self.params:
            param.grad = None
        received = torch.empty(self.length)
        dist.group.WORLD._reduce_scatter_base(received, sent.view(-1))
        self.grads = received.split(self.lengths)


class _ScatterAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: _Group, x: Tensor) -> Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.group.scatter_gradients()
        return (None, *gradients)


def sharded_by_hand(_device_type: str) -> Step:
    """A step of the program ``fully_sharded`` on the CPU."""
    model = transformer()
    groups = [_Group(block) for block in model]
    for group in groups:
        group.free()
    tokens = torch.randn(BATCH, LENGTH, WIDTH)

    def step() -> None:
        x = tokens
        for block, group in zip(model, groups, strict=True):
            group.gather()
            x = block(_ScatterAfter.apply(group, x) if x.requires_grad else x)
            group.free()
            x.register_hook(lambda gradient, group=group: group.gather())
        x.sum().backward()
        groups[0].scatter_gradients()

    return step
