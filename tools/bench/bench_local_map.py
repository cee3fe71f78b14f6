"""Times functions applied to local tensors: PyTorch's ``local_map`` (stock) and funcol's.

One table, in microseconds: a call, with and without its backward pass, on a group that sends nothing. See
docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import CPU, Case, bench_cases
from runner import Call, Table, cells, mark, repeat, run, show
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

import funcol

NUM_RANKS = 4
LIMIT = 1 / 3
SHAPE = (8, 8)

R = Replicate()


def scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def product_and_sum(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x * w
    return y, y.sum()


def scaled_by_number(x: Tensor, factor: float) -> Tensor:
    return x * factor


def scaled_pair(pair: tuple[Tensor, Tensor]) -> Tensor:
    return pair[0] * pair[1]


def dtensor(mesh: DeviceMesh, placements: Any, requires_grad: bool) -> DTensor:
    local = torch.ones(SHAPE)
    return DTensor.from_local(local, mesh, placements, run_check=False).requires_grad_(requires_grad)


def local_of(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(map(local_of, argument))
    if not isinstance(argument, DTensor):
        return argument
    return argument.to_local().detach().requires_grad_(argument.requires_grad)


def cases() -> Iterator[Case]:
    mesh = init_device_mesh("cpu", (2, NUM_RANKS // 2))
    s, wide = [Shard(0), R], [Shard(0), Shard(1)]
    for requires_grad in (False, True):
        x, w = dtensor(mesh, s, requires_grad), dtensor(mesh, s, requires_grad)
        y = dtensor(mesh, wide, requires_grad)
        programs: list[tuple[str, Callable[..., Any], Any, Any, tuple[Any, ...]]] = [
            ("two tensors", scaled, s, (s, s), (x, w)),
            ("two axes", scaled, wide, (wide, wide), (y, y)),
            ("two results", product_and_sum, (s, [Partial(), R]), (s, s), (x, w)),
            ("a number", scaled_by_number, s, (s, None), (x, 2.0)),
            ("a pair", scaled_pair, s, (s, s), ((x, w),)),
        ]
        for name, function, out, inputs, args in programs:
            yield case(name, function, out, inputs, args, mesh, is_backward=False)
            if requires_grad:
                yield case(name, function, out, inputs, args, mesh, is_backward=True)


def case(
    name: str,
    function: Callable[..., Any],
    outputs: Any,
    inputs: Any,
    args: tuple[Any, ...],
    mesh: DeviceMesh,
    is_backward: bool,
) -> Case:
    """Returns a case whose ``raw`` and ``use`` are the function itself on local tensors."""
    stated = {"out_placements": outputs, "in_placements": inputs, "device_mesh": mesh}
    stock = call_of(local_map(function, **stated), args, is_backward)
    ours = call_of(funcol.local_map.apply_local_map(function, **stated), args, is_backward)
    plain = call_of(function, tuple(map(local_of, args)), is_backward)
    needs_gradient = any(leaf.requires_grad for leaf in leaves_of(args))
    kind = ", backward" if is_backward else ", recorded" if needs_gradient else ""
    return Case(name + kind, stock, plain, ours, plain, {"stock overhead": LIMIT})


def leaves_of(args: tuple[Any, ...]) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, Tensor)]


def call_of(function: Callable[..., Any], args: tuple[Any, ...], is_backward: bool) -> Call:
    if not is_backward:
        return lambda: function(*args)
    leaves = list(dict.fromkeys(leaves_of(args)))
    result = function(*args)
    results = result if isinstance(result, tuple) else (result,)
    gradients = [one.detach() for one in results]

    def forward_and_backward() -> Any:
        result = function(*args)
        results = result if isinstance(result, tuple) else (result,)
        return torch.autograd.grad(results, leaves, gradients)

    return forward_and_backward


def print_cases(records: list[dict[str, Any]]) -> None:
    def row(record: dict[str, Any]) -> list[str]:
        (target,) = record["targets"]
        times = cells(record["us"], ("raw", "stock", "funcol"), 1)
        return [record["name"], *times, f"{target['ratio']:.3f}", mark(target["met"])]

    show(
        "A call in us, median (best); overhead: what stock and funcol take above the function alone",
        "{:<24}{:>18}{:>18}{:>18}{:>10}   {}",
        ("", "function alone", "stock", "funcol", "overhead", f"limit {LIMIT:.3f}"),
        map(row, records),
    )


def bench(repeat: int) -> list[dict[str, Any]]:
    return bench_cases("calls", lambda _: cases(), CPU, NUM_RANKS, repeat)["cases"]


if __name__ == "__main__":
    run(__doc__, [Table("calls", lambda args: bench(args.repeat), print_cases)], repeat(21))
