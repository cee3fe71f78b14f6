"""Programs of ``parallel_steps`` written by hand: local tensors, raw collectives and the fewest hooks.

What a step takes above the plain program is what no layer that does the same can avoid. DTensor and FSDP2
do more, and funcol under them.
"""

from __future__ import annotations

from typing import Any

import raw_collectives
import torch
from parallel_steps import (
    BATCH,
    LENGTH,
    NUM_BLOCKS,
    NUM_EXPERTS,
    NUM_RANKS,
    WIDTH,
    Experts,
    Step,
    forward_and_backward,
    orthogonalized,
    transformer,
    weights_and_gradients,
)
from raw_autograd import all_gather, all_to_all, reduce_scatter
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
    """Returns a step of the program ``fully_sharded`` on the CPU."""
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


class _GatherScatter(nn.Module):
    """Gathers the sequence for ``inner``, and scatters the sum of what the ranks' parts of it give."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return reduce_scatter(self.inner(all_gather(x, NUM_RANKS, 1)), NUM_RANKS, 1)


def tensor_parallel_by_hand(_device_type: str) -> Step:
    """Returns a step of the program ``tensor_parallel`` on the CPU."""
    model = transformer()
    for block in model:
        for name, linear in block.named_modules():
            if isinstance(linear, nn.Linear):
                by_rows = name in ("attention.out", "feed_forward.down")
                part = linear.weight.detach().chunk(NUM_RANKS, 1 if by_rows else 0)[0]
                linear.weight = nn.Parameter(part.clone())
        block.attention = _GatherScatter(block.attention)
        block.feed_forward = _GatherScatter(block.feed_forward)
    return forward_and_backward(model, torch.randn(BATCH, LENGTH // NUM_RANKS, WIDTH))


def expert_parallel_by_hand(_device_type: str) -> Step:
    """Returns a step of the program ``expert_parallel`` on the CPU."""

    def exchange(tokens: Tensor) -> Tensor:
        return all_to_all(tokens, None, None).view(1, -1, WIDTH)

    def bring_back(tokens: Tensor) -> Tensor:
        return all_to_all(tokens.view(NUM_EXPERTS, -1, WIDTH), None, None)

    torch.manual_seed(0)
    model = nn.Sequential(*(Experts(exchange, bring_back) for _ in range(NUM_BLOCKS)))
    for layer in model:
        for name in ("up", "down"):
            setattr(layer, name, nn.Parameter(getattr(layer, name).detach()[:1].clone()))
    return forward_and_backward(model, torch.randn(2 * NUM_EXPERTS, WIDTH))


@torch.no_grad()
def muon_by_hand(_device_type: str) -> Step:
    """Returns a step of the program ``muon`` on the CPU."""
    pairs = [[tensor.chunk(NUM_RANKS)[0].clone() for tensor in pair] for pair in weights_and_gradients()]

    def step() -> None:
        for weight, gradient in pairs:
            change = orthogonalized(raw_collectives.all_gather(gradient, NUM_RANKS))
            weight.add_(change[: len(weight)], alpha=-1e-3)

    return step
