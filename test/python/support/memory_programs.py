"""Training steps on weights of some MB, and the most that PyTorch's caching allocator held meanwhile.

The programs do not know of funcol. Each takes the number of ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from ranks import device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import funcol

NUM_BLOCKS = 3
WIDTH = 512
HIDDEN = 1536  # a weight has 3 MB, as have the activations between two
BATCH, LENGTH = 4, 128

NUM_FIRST, NUM_LATER = 2, 2

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))


class Training:
    """A step is ``num_parts`` forward and backward passes, then an update; FSDP2 reduces gradients after the
    last pass.

    ``foreach``: the optimizer takes all parameters in one call, which have to be on one mesh.
    """

    def __init__(
        self, model: nn.Module, length: int = LENGTH, num_parts: int = 1, foreach: bool = True
    ) -> None:
        self._model = model
        self._length = length
        self._num_parts = num_parts
        self._optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=foreach)

    def pass_through(self) -> None:
        for part in range(self._num_parts):
            if isinstance(self._model, FSDPModule):
                self._model.set_requires_gradient_sync(part == self._num_parts - 1)
            x = torch.randn(BATCH, self._length, WIDTH)
            self._model(x).float().square().mean().backward()

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def fully_sharded(
    world: int, reshard: bool | int = True, mixed: bool = False, num_parts: int = 1
) -> Training:
    mesh = init_device_mesh(device_type(), (world,))
    policy = MIXED if mixed else MixedPrecisionPolicy()
    model = sharded(blocks(), mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return Training(model, num_parts=num_parts)


def replicated_and_sharded(world: int) -> Training:
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return Training(sharded(blocks(), mesh=mesh))


def cut(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Tensor parallel: by columns, then by rows."""
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def fully_sharded_and_cut(world: int, reshard: bool = True, mixed: bool = False) -> Training:
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("dp", "tp"))
    policy = MIXED if mixed else MixedPrecisionPolicy()
    model = cut(blocks(), mesh["tp"])
    sharded(model, mesh=mesh["dp"], reshard_after_forward=reshard, mp_policy=policy)
    return Training(model, foreach=False)


def tensor_parallel(world: int) -> Training:
    return Training(cut(blocks(), init_device_mesh(device_type(), (world,))), foreach=False)


def sequence_parallel(world: int) -> Training:
    """Tensor parallel, the activations between cut by the sequence."""
    by_name: dict[str, ParallelStyle] = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    mesh = init_device_mesh(device_type(), (world,))
    model = blocks()
    for block in model:
        parallelize_module(block, mesh, by_name)
    return Training(model, LENGTH // world, foreach=False)


class TrainingOfDTensors(Training):
    """Weights and data are DTensors; gradients are summed over the first axis after the passes."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__(model)
        self._mesh = mesh

    def pass_through(self) -> None:
        x = distribute_tensor(torch.randn(BATCH, LENGTH, WIDTH), self._mesh, [Shard(0), Replicate()])
        self._model(x).square().mean().backward()
        for parameter in self._model.parameters():
            assert isinstance(parameter.grad, DTensor)
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def all_dtensors(world: int) -> Training:
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("dp", "tp"))
    cuts = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    model = blocks()
    for block in model:
        for name, weight in list(block.named_parameters()):
            path, _, leaf = name.rpartition(".")
            last = cuts.get(name, Replicate())
            made = distribute_tensor(weight.detach(), mesh, [Replicate(), last], src_data_rank=None)
            setattr(block.get_submodule(path), leaf, nn.Parameter(made))
    return TrainingOfDTensors(model, mesh)


def peaks(
    rank: int, world: int, program: Callable[..., Training], args: tuple[Any, ...], with_funcol: bool
) -> dict[str, int]:
    """Returns the most bytes during the first steps and during later ones."""
    if with_funcol:
        funcol.install()
    try:
        training = program(world, *args)
        return {**_peaks_of("first", training, NUM_FIRST), **_peaks_of("later", training, NUM_LATER)}
    finally:
        if with_funcol:
            funcol.uninstall()


def _peaks_of(which: str, training: Training, number: int) -> dict[str, int]:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    passes = updates = reserved = 0
    for _ in range(number):
        training.pass_through()
        passes = max(passes, torch.cuda.max_memory_allocated())
        reserved = max(reserved, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
        training.update()
        updates = max(updates, torch.cuda.max_memory_allocated())
        reserved = max(reserved, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()
    return {
        f"allocated in passes of {which} steps": passes,
        f"allocated in updates of {which} steps": updates,
        f"reserved in {which} steps": reserved,
    }
