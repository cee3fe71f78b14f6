"""The demo's part on values: lines on DTensors that stock PyTorch gets wrong or refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import funcol

NUM_RANKS = 4
Place = Callable[[Tensor], Tensor]


def written(place: Place) -> Tensor:
    x = place(torch.zeros(4, 2))
    x[0] = 7
    return x.sum()


def summed(place: Place) -> float:
    return place(torch.arange(8.0)).sum().item()


def mean_loss(place: Place) -> Tensor:
    return F.mse_loss(place(torch.arange(7.0)), place(torch.zeros(7)))


def made_partial(place: Place) -> Tensor:
    x = place(torch.arange(8.0))
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[Replicate()]).redistribute(placements=[Partial()])
    return x.sum()


LINES: dict[str, Callable[[Place], Tensor | float]] = {
    "x = zeros(4, 2); x[0] = 7; x.sum()": written,
    "arange(8.).sum().item()": summed,
    "mse_loss(arange(7.), zeros(7))": mean_loss,
    "arange(8.), replicated to partial": made_partial,
}


class Values(NamedTuple):
    """Values of a line on one device and as DTensors; a value that was refused is its error's type."""

    one_device: float
    stock: float | str
    funcol: float | str

    def is_right(self, side: str) -> bool:
        value = getattr(self, side)
        return not isinstance(value, str) and math.isclose(value, self.one_device, rel_tol=1e-5)


def right() -> dict[str, Values]:
    """Returns the values of each of :data:`LINES` on this rank; tensors are cut along dim 0."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    return {
        name: Values(_number(line(lambda x: x)), _value(line, mesh, False), _value(line, mesh, True))
        for name, line in LINES.items()
    }


def _value(line: Callable[[Place], Tensor | float], mesh: DeviceMesh, on_funcol: bool) -> float | str:
    with funcol.installed() if on_funcol else nullcontext():
        try:
            return _number(line(lambda x: distribute_tensor(x, mesh, [Shard(0)])))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return type(error).__name__


def _number(value: Tensor | float) -> float:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return float(value)
