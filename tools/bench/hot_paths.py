"""The calls whose instructions `instructions.py` counts: what a training step spends its host time on.

Tensors are so small that kernels hardly count. Each function yields the calls of one subject, inside a
process group that sends nothing: a call is valid until the next one is requested.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from bench_collectives import call_cases as collective_cases
from bench_dtensor_ops import LINES, NUM_RANKS, call_of
from bench_propagation import forget_decisions
from bench_redistribute import NUM_RANKS as NUM_REDISTRIBUTE_RANKS
from bench_redistribute import NUM_TENSORS, PLANS, call_cases, many_case, plan_case
from collective_cases import backward_call
from measure import CPU, lone_group
from parallel_steps import NUM_BLOCKS, Block, Step, forward_and_backward
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import funcol

REMEMBERED = [
    ("add", False),
    ("mm", False),
    ("split", False),
    ("foreach mul_", False),
    ("linear", True),
    ("layer_norm", True),
]
MISSED = ["add", "mm", "layer_norm"]
REDISTRIBUTED = ["S0 -> R", "P -> R", "P -> S0", "S0 -> S1", "S0,S1 -> R,R"]
REDISTRIBUTED_TOGETHER = [("S0", "R"), ("P", "S0")]

PRECISIONS = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class HotPath(NamedTuple):
    """A call and the number of times to repeat it in each round: once for calls that take long."""

    name: str
    call: Callable[[], Any]
    num_calls: int = 8


def collectives() -> Generator[HotPath, None, None]:
    """Yields collectives with the first use of their results, and views of pending results."""
    with lone_group(CPU, 2):
        group: Any = dist.group.WORLD
        x = torch.ones(4, 8)

        def reduced(x: Tensor) -> Tensor:
            return funcol.all_reduce(x, "sum", group)

        def views() -> list[Tensor]:
            y = reduced(x)
            return [y.view(-1), y.t(), y[0], y[:, 1:], y.detach(), y.unsqueeze(0), y + 1]

        for case in collective_cases(CPU, 2):
            yield HotPath(case.name.partition(" (")[0], case.funcol)
        yield HotPath("all_reduce + use, backward", backward_call(reduced, [x], [torch.ones_like(x)], False))
        yield HotPath("all_reduce + 6 views + use", views)


def dtensor_operators() -> Generator[HotPath, None, None]:
    """Yields operators on DTensors: decided before, and decided anew in every call."""
    lines = {line.name: line for line in LINES}

    def missed(call: Callable[[], Any]) -> Callable[[], Any]:
        def decide_and_call() -> Any:
            forget_decisions()
            return call()

        return decide_and_call

    with lone_group(CPU, NUM_RANKS), funcol.installed():
        mesh = init_device_mesh("cpu", (NUM_RANKS // 2, 2))
        for name, with_backward in REMEMBERED:
            with torch.set_grad_enabled(with_backward):
                title = f"DTensor {name}" + (", backward" if with_backward else "")
                yield HotPath(title, call_of(lines[name], mesh, with_backward))
        with torch.no_grad():
            for name in MISSED:
                call = call_of(lines[name], mesh, needs_gradient=False)
                yield HotPath(f"DTensor {name}, missed", missed(call))


def redistributions() -> Generator[HotPath, None, None]:
    """Yields redistributions of a DTensor, of many DTensors in one call, and plans that are not cached."""
    with lone_group(CPU, NUM_REDISTRIBUTE_RANKS):
        for case in call_cases(CPU):
            if case.name in REDISTRIBUTED:
                yield HotPath(f"redistribute {case.name}", case.funcol)
        for src, dst in REDISTRIBUTED_TOGETHER:
            name = f"redistribute_many {src} -> {dst}, {NUM_TENSORS} tensors"
            yield HotPath(name, many_case(CPU, src, dst)["funcol"], num_calls=1)
    with lone_group(CPU, 16):
        for num_axes, src, dst in PLANS:
            yield HotPath(f"plan {src} -> {dst}", plan_case(num_axes, src, dst)[1])


def fully_sharded() -> Generator[HotPath, None, None]:
    """Yields training steps of FSDP2, by precision."""
    with lone_group(CPU, NUM_RANKS), funcol.installed():
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for name, policy in PRECISIONS.items():
            yield HotPath(f"FSDP2 step {name}", fully_sharded_step(mesh, policy), num_calls=1)


def fully_sharded_step(mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> Step:
    """Returns a step of a transformer so narrow that FSDP2 is most of the work."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(16, 2) for _ in range(NUM_BLOCKS)))
    for part in (*model, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return forward_and_backward(model, torch.randn(1, 2, 16))


SUBJECTS = (collectives, dtensor_operators, redistributions, fully_sharded)


def hot_paths() -> Iterator[HotPath]:
    for subject in SUBJECTS:
        yield from subject()


def import_modules() -> None:
    """Runs a path of each subject, so that all modules are imported: that takes several times longer while
    instructions are counted."""
    for subject in SUBJECTS:
        with contextlib.closing(subject()) as paths:
            next(paths).call()
