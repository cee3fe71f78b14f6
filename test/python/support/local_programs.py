"""Programs that apply functions to local tensors, and the same programs on whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from ranks import device_type
from sharded import mesh_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import funcol

R, P, AVG = Replicate(), Partial(), Partial("avg")


def S(dim: int) -> Shard:  # noqa: N802
    return Shard(dim)


class Program(NamedTuple):
    """``local`` computes on shards what ``whole`` computes on whole tensors of ``shapes``."""

    mesh_shape: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[list[Placement], ...]
    outputs: Any
    local: Callable[..., Any]
    whole: Callable[..., Any]

    def world(self) -> int:
        return int(torch.tensor(self.mesh_shape).prod())


def matmul(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def two_results(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ w).sin(), (x * x).sum()


def copied_and_own(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return w * w, x @ w


def summed_over_tp(x: Tensor, w: Tensor) -> Tensor:
    return funcol.all_reduce(x @ w, "sum", (mesh_of((2, 2)), 1)).sin()


def sin_of_matmul(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).sin()


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t() * 3


def mean_of_squares(x: Tensor) -> Tensor:
    return (x * x).mean()


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    y.add_(1)
    return y.relu_()


def nothing_between(x: Tensor) -> tuple[Tensor, None]:
    return x.exp(), None


PROGRAMS = {
    "batch": Program((2,), ((4, 6), (6, 3)), ([S(0)], [R]), [S(0)], sin_of_matmul, sin_of_matmul),
    "uneven batch": Program((2,), ((5, 6), (6, 3)), ([S(0)], [R]), [S(0)], sin_of_matmul, sin_of_matmul),
    "one row": Program((3,), ((1, 6), (6, 3)), ([S(0)], [R]), [S(0)], sin_of_matmul, sin_of_matmul),
    "columns": Program((2,), ((4, 6), (6, 4)), ([R], [S(1)]), [S(-1)], sin_of_matmul, sin_of_matmul),
    "rows": Program((2,), ((4, 6), (6, 3)), ([S(1)], [S(0)]), [P], matmul, matmul),
    "alike": Program((2,), ((4, 6), (6, 3)), ([R], [R]), [R], sin_of_matmul, sin_of_matmul),
    "one rank": Program((1,), ((4, 6), (6, 3)), ([S(0)], [R]), [S(0)], sin_of_matmul, sin_of_matmul),
    "both axes": Program(
        (2, 2), ((4, 6), (6, 4)), ([S(0), R], [R, S(1)]), [S(0), S(1)], sin_of_matmul, sin_of_matmul
    ),
    "rows and batch": Program((2, 2), ((4, 6), (6, 3)), ([S(0), S(1)], [R, S(0)]), [S(0), P], matmul, matmul),
    "reduced inside": Program(
        (2, 2), ((4, 6), (6, 3)), ([S(0), S(1)], [R, S(0)]), [S(0), R], summed_over_tp, sin_of_matmul
    ),
    "two results": Program((2,), ((4, 6), (6, 3)), ([S(0)], [R]), ([S(0)], [P]), two_results, two_results),
    "copied and own": Program(
        (2,), ((4, 6), (6, 3)), ([S(0)], [R]), ([R], [S(0)]), copied_and_own, copied_and_own
    ),
    "in place": Program((2,), ((4, 6), (6, 3)), ([S(0)], [R]), [S(0)], in_place, in_place),
    "no tensor": Program((2,), ((4, 6),), ([S(0)],), ([S(0)], None), nothing_between, nothing_between),
    "partial input": Program((2,), ((4, 6), (3, 6)), ([P], [R]), [P], scaled, scaled),
    "average of averages": Program((2,), ((4, 6), (3, 6)), ([AVG], [R]), [AVG], scaled, scaled),
    "average": Program((2,), ((4, 6),), ([S(0)],), [AVG], mean_of_squares, mean_of_squares),
}


def whole_tensors(program: Program) -> list[Tensor]:
    generator = torch.Generator(device_type()).manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in program.shapes]


def tensors_of(result: Any) -> list[Tensor]:
    results = result if isinstance(result, tuple) else (result,)
    return [one for one in results if isinstance(one, Tensor)]


def weighted(results: Sequence[Tensor]) -> Tensor:
    """Returns a loss in which every element counts differently."""
    total = torch.zeros((), dtype=torch.float64)
    for result in results:
        weights = torch.arange(1, result.numel() + 1, dtype=torch.float64).view(result.shape).cos()
        total = total + (result * weights).sum()
    return total


def expected(program: Program) -> tuple[list[Tensor], list[Tensor]]:
    """Returns results and gradients of one process."""
    leaves = [one.requires_grad_() for one in whole_tensors(program)]
    results = tensors_of(program.whole(*leaves))
    return [one.detach() for one in results], list(torch.autograd.grad(weighted(results), leaves))


def applied(program: Program, mesh: DeviceMesh) -> Callable[..., Any]:
    return funcol.local_map.apply_local_map(program.local, program.outputs, program.inputs, None, mesh, True)


def sharded_leaves(program: Program, mesh: DeviceMesh, placements: Any = None) -> list[DTensor]:
    return [
        funcol.redistribute(distribute_tensor(one, mesh, [R] * mesh.ndim), placements=wanted).requires_grad_()
        for one, wanted in zip(whole_tensors(program), placements or program.inputs, strict=True)
    ]


def check(program: Program, results: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    want_results, want_gradients = expected(program)
    for got, want in zip([*results, *gradients], [*want_results, *want_gradients], strict=True):
        whole = got.full_tensor() if isinstance(got, DTensor) else got
        assert torch.allclose(whole, want, rtol=1e-12, atol=1e-12), (whole, want)
