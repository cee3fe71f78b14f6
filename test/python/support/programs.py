"""Programs that do not know of funcol, run without and with it."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed._functional_collectives as stock
from ranks import device_type, on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import funcol

Program = Callable[..., list[Tensor]]

WORLDS = [2, 4]


def check(program: Program, world: int, *args: Any, pends: bool = True, counts: bool = True) -> None:
    """``program(rank, world, *args)`` computes the same on ``world`` ranks with funcol installed: the same
    placements and values, but for the last bits, as partial sums may be made and added up in another order.

    With ``pends``, collectives of funcol run; with ``counts``, it takes as many as without, or fewer."""
    run_ranks(_check, world, program, args, pends, counts, timeout=180)


# Makes a test of a program, which computes the same; takes the options of check().
computes_the_same = functools.partial(on_ranks, run=check)


def _check(rank: int, world: int, program: Program, args: tuple[Any, ...], pends: bool, counts: bool) -> None:
    def compute() -> tuple[list[Tensor], list[Any]]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = program(rank, world, *args)
        return settled(results), [getattr(result, "placements", None) for result in results]

    before, placements_before = compute()
    waits = funcol._C.async_counters()[0]
    with funcol.installed():
        during, placements_during = compute()
    assert placements_during == placements_before
    torch.testing.assert_close(during, before, rtol=1e-5, atol=1e-6)
    assert funcol._C.async_counters()[0] > waits or not pends, "no collective of funcol ran"
    torch.testing.assert_close(compute()[0], before, rtol=0, atol=0)
    if counts:
        expected = _num_collectives(compute)
        with funcol.installed():
            found = _num_collectives(compute)
        assert sum(found.values()) <= sum(expected.values()), (found, expected)


class _Collectives(TorchDispatchMode):
    """Counts those that run inside. PyTorch's CommDebugMode fails on modules of older releases."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func.namespace.lstrip("_") in ("c10d", "c10d_functional", "dtensor") and "wait" not in func.name():
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def _num_collectives(compute: Callable[[], Any]) -> Counter[str]:
    with _Collectives() as mode:
        compute()
    return mode.counts


def settled(results: list[Tensor]) -> list[Tensor]:
    locals_ = [result.to_local() if isinstance(result, DTensor) else result for result in results]
    return [
        (result.wait() if isinstance(result, stock.AsyncCollectiveTensor) else result) for result in locals_
    ]


def mesh_of(*shape: int) -> DeviceMesh:
    names = ("dp", "tp") if len(shape) == 2 else ("tp",)
    return init_device_mesh(device_type(), shape, mesh_dim_names=names)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))
