"""Norms whose parts lie on several ranks under funcol.install(), and operators that take them, beside plain
tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import made_once, on_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import funcol

WORLD = 4
ORDERS = [0.0, 1.0, 2.0, 3.0, float("inf"), -float("inf")]
LAYOUTS: list[list[Placement]] = [
    [Shard(0), Shard(1)],
    [Replicate(), Shard(0)],
    [Shard(1), Replicate()],
    [Replicate(), Replicate()],
]

Norms = list[Tensor]

# Each gets the norms of one tensor for each of LAYOUTS: scalars, most of which are pending on other axes.
USES: dict[str, Callable[[Norms], Any]] = {
    "stack": torch.stack,
    "norm of norms": lambda norms: torch.linalg.vector_norm(torch.stack(norms), 2.0),
    "norm of norms, by 1": lambda norms: torch.linalg.vector_norm(torch.stack(norms), 1.0),
    "sum": lambda norms: torch.stack(norms).sum(),
    "maximum": lambda norms: torch.maximum(norms[0], norms[1]),
    "add": lambda norms: norms[0] + norms[1],
    "add a number": lambda norms: norms[0] + 1e-6,
    "multiply": lambda norms: norms[0] * norms[2],
    "multiply by a number": lambda norms: norms[0] * 2.0,
    "multiply in place": lambda norms: norms[1].mul_(2.0),
    "divide a number": lambda norms: (1.0 / (norms[0] + 1e-6)).clamp(max=1.0),
    "compare": lambda norms: norms[0] > norms[1],
    "compare with a number": lambda norms: norms[2] < 3.0,
    "is finite": lambda norms: torch.logical_or(norms[0].isnan(), norms[0].isinf()),
    "item": lambda norms: torch.tensor([norm.item() for norm in norms], dtype=torch.float64),
    "lists": lambda norms: torch.stack(torch._foreach_mul(norms, 2.0)),
    "a list in place": lambda norms: (torch._foreach_mul_(norms, 2.0), torch.stack(norms))[1],
}


@made_once
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norms_of(tensors: list[Tensor], order: float, foreach: bool) -> Norms:
    if foreach:
        return list(torch._foreach_norm(tensors, order))
    return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "one by one"])
@pytest.mark.parametrize("name", USES)
@on_ranks(WORLD)
def test_norms_are_used_as_plain_ones(rank: int, world: int, name: str, foreach: bool) -> None:
    plain = [
        torch.arange(24.0, dtype=torch.float64).reshape(4, 6).sub(7 + 2 * i) for i in range(len(LAYOUTS))
    ]
    mine = [distribute_tensor(tensor, mesh(), layout) for tensor, layout in zip(plain, LAYOUTS, strict=True)]
    for order in ORDERS:
        expected = USES[name](norms_of(plain, order, foreach))
        with funcol.installed():
            for _ in range(2):  # decided, then remembered
                found = full(USES[name](norms_of(mine, order, foreach)))
                torch.testing.assert_close(found, expected, msg=lambda text: f"order {order}: {text}")  # noqa: B023
