"""A small transformer trains on the simulated GPU as on the CPU."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 3


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(50, 32), layer, nn.Linear(32, 50))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> list[float]:
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trains_as_on_the_cpu(make_optimizer: Callable[..., torch.optim.Optimizer], **settings: Any) -> None:
    models = [make_model(), make_model().cuda()]
    tokens = torch.randint(0, 50, (4, 10), generator=torch.Generator().manual_seed(1))
    losses = []
    for model in models:
        optimizer = make_optimizer(model.parameters(), lr=1e-2, **settings)
        losses.append(train(model, optimizer, tokens.to(next(model.parameters()).device)))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        # Adam divides by roots of small second moments, which enlarges rounding.
        torch.testing.assert_close(other.cpu(), one, rtol=1e-3, atol=1e-3)


def gradients_of(model: nn.Module, data: Tensor) -> list[Tensor]:
    model(data).square().sum().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def convolutions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, stride=2)
    )
    data = torch.randn(2, 3, 8, 8)
    copied = copy.deepcopy(model).cuda()
    torch.testing.assert_close(
        gradients_of(copied, data.cuda()), gradients_of(model, data), rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(copied[1].running_mean.cpu(), model[1].running_mean)


def mixed_precision() -> None:
    """Autocast and a gradient scaler: gradients differ from float32's by the rounding of bfloat16."""
    model, data = nn.Linear(16, 4).cuda(), torch.randn(8, 16, device="cuda")
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cuda", torch.bfloat16, enabled=enabled):
            loss = model(data).float().square().mean()
        loss.backward()
        assert model.weight.grad is not None
        gradients.append(model.weight.grad.clone())
        model.zero_grad()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=5e-2, atol=5e-2)

    scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    scaler.scale(model(data).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model.weight)


def checkpoints() -> None:
    """Recomputation draws the numbers of the forward pass again."""
    data = torch.ones(256, device="cuda", requires_grad=True)
    result = torch.utils.checkpoint.checkpoint(nn.functional.dropout, data, 0.5, use_reentrant=False)
    result.sum().backward()
    assert data.grad is not None
    assert torch.equal(data.grad, result.detach())


CHECKS: dict[str, Callable[[], None]] = {
    "AdamW": functools.partial(trains_as_on_the_cpu, torch.optim.AdamW),
    "fused AdamW": functools.partial(trains_as_on_the_cpu, torch.optim.AdamW, fused=True),
    "foreach AdamW": functools.partial(trains_as_on_the_cpu, torch.optim.AdamW, foreach=True),
    "SGD": functools.partial(trains_as_on_the_cpu, torch.optim.SGD, momentum=0.9),
    "convolutions": convolutions,
    "mixed precision": mixed_precision,
    "checkpoints": checkpoints,
}
