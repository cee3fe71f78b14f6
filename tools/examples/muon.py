"""Muon on FSDP2 weights, on four gloo ranks, three ways: same weights, time and bytes a rank for each.

Muon orthogonalises the momentum of each weight matrix, which takes the whole matrix. FSDP2 cuts it into rows.

- owners: each matrix goes to one rank, which orthogonalises it, and back: two collectives a step.
- gathered: every rank gets every matrix, by one collective, and orthogonalises them all.
- stock: the same by DTensor.full_tensor and redistribute, matrix by matrix, on PyTorch alone.

    python tools/examples/muon.py [--steps N] [--width N]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

import funcol

NUM_RANKS = 4
NUM_LAYERS = 12
LEARNING_RATE = 0.02
MOMENTUM = 0.95
LIMIT_S = 300


def orthogonalized(matrix: Tensor) -> Tensor:
    """Returns five steps of the quintic Newton-Schulz iteration (K. Jordan et al., Muon, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    is_tall = x.size(0) > x.size(1)
    x = x.T if is_tall else x
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if is_tall else x


class Owners:
    """Each matrix is orthogonalised by its owner. Newton-Schulz takes min(n, m)^2 max(n, m)
    multiplications."""

    def __init__(self, weights: list[DTensor]) -> None:
        shapes = [weight.shape for weight in weights]
        owners = funcol.redistribution.assign_owners(
            shapes, dist.get_world_size(), cost=lambda shape: min(shape) ** 2 * max(shape)
        )
        self._owners = [funcol.redistribution.Owned(owner) for owner in owners]
        self._placements = [weight.placements for weight in weights]

    def __call__(self, momenta: list[DTensor]) -> list[DTensor]:
        owned = funcol.redistribute_many(momenta, self._owners)
        changes = [one if one.whole is None else one.with_whole(orthogonalized(one.whole)) for one in owned]
        return funcol.redistribute_many(changes, self._placements)


def gathered(momenta: list[DTensor]) -> list[DTensor]:
    wholes = funcol.redistribute_many(momenta, [Replicate()])
    changes = [
        DTensor.from_local(
            orthogonalized(whole.to_local()), whole.device_mesh, [Replicate()], run_check=False
        )
        for whole in wholes
    ]
    return funcol.redistribute_many(changes, [momentum.placements for momentum in momenta])


def stock(momenta: list[DTensor]) -> list[DTensor]:
    changes = []
    for momentum in momenta:
        change = orthogonalized(momentum.full_tensor())
        whole = DTensor.from_local(change, momentum.device_mesh, [Replicate()], run_check=False)
        changes.append(whole.redistribute(placements=momentum.placements))
    return changes


class Muon(torch.optim.Optimizer):
    """``orthogonalize`` takes the momenta of all weights, and returns their changes."""

    def __init__(
        self, weights: list[DTensor], orthogonalize: Callable[[list[DTensor]], list[DTensor]]
    ) -> None:
        super().__init__(weights, {"lr": LEARNING_RATE})
        self._orthogonalize = orthogonalize

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        weights: list[Any] = self.param_groups[0]["params"]
        momenta = []
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["momentum"] = torch.zeros_like(weight)
            momenta.append(state["momentum"].mul_(MOMENTUM).add_(weight.grad))
        for weight, change in zip(weights, self._orthogonalize(momenta), strict=True):
            weight.add_(change, alpha=-self.param_groups[0]["lr"])


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Linear(width * (1 + i % 3), width * (1 + (i + 1) % 3), bias=False) for i in range(NUM_LAYERS)
    ]
    model = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def batches(rank: int, steps: int, width: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        yield torch.randn(8, width, generator=generator)


def bytes_written() -> int:
    """By this process so far: gloo writes to sockets."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def train(rank: int, steps: int, width: int) -> dict[str, dict[str, float]]:
    init_device_mesh("cpu", (NUM_RANKS,))
    ways: dict[str, Callable[[list[DTensor]], Callable[[list[DTensor]], list[DTensor]]]] = {
        "stock": lambda _: stock,
        "gathered": lambda _: gathered,
        "owners": Owners,
    }
    results: dict[str, dict[str, float]] = {}
    expected: list[Tensor] = []
    for name, way in ways.items():
        model = model_of(width)
        weights: list[Any] = list(model.parameters())
        optimizer = Muon(weights, way(weights))
        seconds, written = [], 0
        for batch in batches(rank, steps, width):
            model(batch).square().mean().backward()
            dist.barrier()
            begin, before = time.perf_counter(), bytes_written()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
            written += bytes_written() - before
            optimizer.zero_grad()
        held = [weight.to_local().clone() for weight in weights]
        expected = expected or held
        is_same = all(torch.equal(one, other) for one, other in zip(held, expected, strict=True))
        if not is_same:
            raise RuntimeError(f"{name}: the weights after {steps} steps are not those of stock")
        slowest = torch.tensor([sorted(seconds)[len(seconds) // 2], float(written) / steps])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        results[name] = {"ms": 1000 * slowest[0].item(), "MiB": slowest[1].item() / 2**20}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=128, help="weights have one to three times as many rows")
    options = parser.parse_args()
    results = run_on_ranks(train, NUM_RANKS, options.steps, options.width, limit_s=LIMIT_S)
    print(f"{options.steps} steps, {NUM_LAYERS} weights on {NUM_RANKS} ranks: the same weights in all ways")
    print(f"{'':<10}{'optimizer step, ms':>20}{'MiB sent a rank':>18}")
    for name, of_way in results.items():
        print(f"{name:<10}{of_way['ms']:>20.1f}{of_way['MiB']:>18.4f}")


if __name__ == "__main__":
    main()
