"""One norm and one optimizer step over parameters on several meshes, beside plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import made_once, on_ranks
from sharded import full
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

import funcol

WORLD = 4

MIXES = [
    ("dp and tp", "dp"),
    ("dp", "plain"),
    ("plain", "dp and tp"),
    ("dp", "tp"),
    ("dp and tp", "dp", "plain", "dp"),
    ("experts", "dp and tp", "plain"),
    ("experts", "dp and tp"),  # one mesh, on which norms are pending along other axes
    ("dp and tp", "dp", "experts", "tp"),
]
each_mix = pytest.mark.parametrize("mix", MIXES, ids=", ".join)


@made_once
def meshes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def placed(tensor: Tensor, where: str) -> Tensor:
    mesh = meshes()
    if where == "plain":
        return tensor.clone()
    if where == "dp and tp":
        return distribute_tensor(tensor, mesh, [Shard(0), Shard(1)])
    if where == "experts":
        return distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])
    return distribute_tensor(tensor, mesh[where], [Shard(0)])


def parameters(mix: tuple[str, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with gradients, and the same as plain tensors."""
    both: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for number, where in enumerate(mix):
        values = torch.arange(15.0).reshape(3, 5) + number
        for found, place in zip(both, (where, "plain"), strict=True):
            parameter = nn.Parameter(placed(values, place))
            parameter.grad = placed(values.flip(0), place)
            found.append(parameter)
    return both


@pytest.mark.sampled(3)
@each_mix
@pytest.mark.parametrize("norm_type", [0.0, 1.0, 2.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "one by one"])
@on_ranks(WORLD)
def test_clips_by_one_norm(
    rank: int, world: int, mix: tuple[str, ...], norm_type: float, foreach: bool | None
) -> None:
    mine, plain = parameters(mix)
    expected = clip_grad_norm_(plain, 1.0, norm_type)
    with funcol.installed():
        alone = get_total_norm([p.grad for p in mine], norm_type, foreach=foreach)
        norm = clip_grad_norm_(mine, 1.0, norm_type, foreach=foreach)
        torch.testing.assert_close((full(alone), full(norm)), (expected, expected))
        for one, other in zip(mine, plain, strict=True):
            torch.testing.assert_close(full(one.grad), other.grad)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "fused Adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "fused SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mix", MIXES[:2] + MIXES[4:], ids=", ".join)
@on_ranks(WORLD)
def test_steps_once(rank: int, world: int, mix: tuple[str, ...], name: str) -> None:
    mine, plain = parameters(mix)
    with funcol.installed():
        ours, theirs = OPTIMIZERS[name](mine), OPTIMIZERS[name](plain)
        for _ in range(2):
            ours.step()
            theirs.step()
        for one, other in zip(mine, plain, strict=True):
            torch.testing.assert_close(full(one), other)


@on_ranks(WORLD)
def test_a_rank_outside_of_a_mesh_is_refused(rank: int, world: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    grads = [distribute_tensor(torch.ones(4), mesh, [Shard(0)]), torch.ones(4)]
    with funcol.installed():
        if rank < 2:
            assert full(get_total_norm(grads)).item() == pytest.approx(8**0.5)
        else:
            with pytest.raises(ValueError, match=f"rank {rank} does not belong to"):
                get_total_norm(grads)


@on_ranks(WORLD)
def test_norm_over_one_mesh_stays_a_dtensor(rank: int, world: int) -> None:
    grads = [placed(torch.ones(4, 4), "dp and tp")] * 2
    with funcol.installed():
        assert isinstance(get_total_norm(grads), DTensor)
