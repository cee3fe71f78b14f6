"""A pipeline of two stages and two micro-batches by plain sends and receives, with tied weights.

A program takes the name of a fault, or None for the correct program.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

WORDS, WIDTH, LENGTH, MICRO_BATCHES = 11, 8, 5, 2


class Model(nn.Module):
    """The parts of the model that a stage has; the embedding, which is the head's weight, is on both."""

    def __init__(self, stages: tuple[str, ...]) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        for name in stages:
            self.add_module(name, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)))

    def start(self, tokens: Tensor) -> Tensor:
        return self.first(self.embed(tokens))

    def end(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.second(x), self.embed.weight).square().mean()


def staged(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor | None]:
    """Runs all forward passes, then all backward ones; the second stage first waits for activations."""
    tokens = torch.randint(WORDS, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    if mesh is None:
        model = Model(("first", "second"))
        loss = model.end(model.start(tokens))
        loss.backward()
        return model, loss
    total: Tensor | None = None
    if mesh.get_rank() == 0:
        model = Model(("first",))
        sent = [model.start(some) for some in tokens.chunk(MICRO_BATCHES)]
        for x in sent:
            dist.send(x.detach(), 1)
        for x in sent:
            gradient = torch.empty_like(x)
            dist.recv(gradient, 1)
            x.backward(gradient)
        if fault == "scaled":
            for parameter in model.first.parameters():
                parameter.grad /= MICRO_BATCHES
    else:
        model = Model(("second",))
        received = [torch.empty(4 // MICRO_BATCHES, LENGTH, WIDTH) for _ in range(MICRO_BATCHES)]
        losses = []
        for x in received:
            dist.recv(x, 0)
            losses.append(model.end(x.requires_grad_()) / MICRO_BATCHES)
        for x, loss in zip(received, losses, strict=True):
            loss.backward()
            dist.send(x.grad, 0)
        total = torch.stack(losses).sum()
    if fault != "tied_unreduced":
        dist.all_reduce(model.embed.weight.grad)
    return model, total
