"""Expert parallelism: each rank has some of the experts, and a part of the tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import funcol

WIDTH, EXPERTS, TOKENS = 6, 4, 20


def batch() -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(5))


class Experts(nn.Module):
    """Each token goes to the expert that the router prefers; experts are stacked in ``weight``."""

    def __init__(self, mesh: DeviceMesh | None, fault: str | None) -> None:
        super().__init__()
        self.mesh = mesh
        self.fault = fault
        self.ranks = 1 if mesh is None else mesh.size()
        self.first = 0 if mesh is None else mesh.get_local_rank() * EXPERTS // self.ranks
        weight = torch.randn(EXPERTS, WIDTH, WIDTH)
        self.weight = nn.Parameter(weight[self.first : self.first + EXPERTS // self.ranks].clone())

    def forward(self, tokens: Tensor, scores: Tensor) -> Tensor:
        if self.mesh is not None:
            tokens = funcol.all_gather_tensor(tokens, 0, (self.mesh, 0))
            scores = funcol.all_gather_tensor(scores, 0, (self.mesh, 0))
        best = scores.argmax(1)
        out = torch.zeros_like(tokens)
        for i, weight in enumerate(self.weight):
            chosen = (best == self.first + i).to(tokens.dtype) * scores[:, self.first + i]
            if self.fault == "wrong_expert" and self.mesh is not None:
                chosen = chosen.roll(1)
            out = out + chosen[:, None] * torch.tanh(tokens @ weight)
        if self.mesh is not None:
            out = funcol.reduce_scatter_tensor(out, "sum", 0, (self.mesh, 0))
            if self.fault == "combined_twice":
                out = out * self.ranks
        return out


class Layer(nn.Module):
    def __init__(self, mesh: DeviceMesh | None, fault: str | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(mesh, fault)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x)
        return x + self.experts(tokens, torch.softmax(self.router(tokens), -1))


def stacked(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor]:
    """Returns two layers of experts. ``expert_gradient_averaged``: as if experts were replicated."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(mesh, None), Layer(mesh, fault))
    x = batch()
    if mesh is not None:
        x = x.chunk(mesh.size())[mesh.get_local_rank()]
    loss = model(x).square().sum()
    loss.backward()
    if mesh is None:
        return model, loss
    for name, parameter in model.named_parameters():
        if not name.endswith("experts.weight"):
            if not (fault == "router_unreduced" and name == "1.router.weight"):
                dist.all_reduce(parameter.grad)
        elif fault == "expert_gradient_averaged" and name.startswith("1"):
            parameter.grad /= mesh.size()
        elif fault == "expert_missing" and name.startswith("1") and mesh.get_local_rank() == 2:
            parameter.grad = None
    return model, loss
