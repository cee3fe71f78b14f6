"""Pipelines of sharded stages, by torch.distributed.pipelining, compute the same with funcol installed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from programs import Block, computes_the_same
from ranks import device_type
from sharded import full
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

NUM_MICROBATCHES = 4

# Zero bubbles compute gradients of inputs and of weights in two passes over the same graph.
SCHEDULES: dict[str, tuple[type, Callable[[int], list[int]]]] = {
    "1F1B": (Schedule1F1B, lambda rank: [rank]),
    "interleaved": (ScheduleInterleaved1F1B, lambda rank: [rank, rank + 2]),
    "zero bubble": (ScheduleZBVZeroBubble, lambda rank: [rank, 3 - rank]),
}


class Stage(nn.Sequential):
    """A stage whose result is not a view: PyTorch's zero bubbles do not take views."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def shard_parameters(stage: nn.Module, mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in stage.children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(stage, mesh=mesh, mp_policy=policy)


def parallelize(stage: nn.Module, mesh: DeviceMesh) -> None:
    for block in stage.children():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def squared_error(result: Tensor, target: Tensor) -> Tensor:
    # PyTorch 2.11 has no gradient of mse_loss() of two dtypes.
    return nn.functional.mse_loss(result.to(target.dtype), target)


SHARDINGS = {"FSDP2 in bf16": shard_parameters, "tensor parallel": parallelize}


# Not zero bubbles of FSDP2: PyTorch makes no gradients of the first stage.
@pytest.mark.parametrize(
    ("sharding", "schedule"),
    [
        ("FSDP2 in bf16", "1F1B"),
        ("FSDP2 in bf16", "interleaved"),
        ("tensor parallel", "interleaved"),
        pytest.param(
            "tensor parallel",
            "zero bubble",
            marks=pytest.mark.skipif(
                torch.__version__ < "2.15",
                reason="older releases send from a rank to itself, which gloo cannot",
            ),
        ),
    ],
)
@computes_the_same(4)
def test_a_pipeline_of_sharded_stages(rank: int, world: int, sharding: str, schedule: str) -> list[Tensor]:
    kind, stages_of = SCHEDULES[schedule]
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("pp", "x"))
    numbers = stages_of(mesh.get_local_rank("pp"))
    num_stages = 2 * len(numbers)
    modules = [Stage(Block(), Block()) for _ in range(num_stages)]
    stages = []
    for number in numbers:
        SHARDINGS[sharding](modules[number], mesh["x"])
        stages.append(
            PipelineStage(
                modules[number], number, num_stages, torch.device(device_type()), group=mesh.get_group("pp")
            )
        )
    pipeline = kind(
        stages[0] if len(stages) == 1 else stages,
        n_microbatches=NUM_MICROBATCHES,
        loss_fn=squared_error,
    )
    losses: list[Tensor] = []
    for _ in range(2):
        x, target = torch.randn(2, 8, 4, 8)
        pipeline.step(
            *([x] if 0 in numbers else []),
            **({"target": target, "losses": losses} if num_stages - 1 in numbers else {}),
        )
    gradients = [p.grad for number in numbers for p in modules[number].parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [loss.detach() for loss in losses] + [full(gradient) for gradient in gradients]
