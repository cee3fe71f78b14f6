"""Tensor and sequence parallelism: norms on parts of the sequence, by hand and with DTensors."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import funcol

WIDTH, HIDDEN, BATCH, LENGTH = 8, 16, 3, 8


def batch() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))


class Gather(nn.Module):
    """Makes the full sequence of the ranks' parts."""

    def __init__(self, group: dist.ProcessGroup | None, fault: str | None) -> None:
        super().__init__()
        self.group = group
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return x
        full = funcol.all_gather_tensor(x, 1, self.group)
        if self.fault == "gathered_in_another_order":
            full = torch.cat(full.chunk(dist.get_world_size(self.group), 1)[::-1], 1)
        return full


class Block(nn.Module):
    def __init__(self, mesh: DeviceMesh | None, fault: str | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        group = None if mesh is None else mesh.get_group("tp")
        self.gather = Gather(group, fault)
        ranks = 1 if mesh is None else mesh["tp"].size()
        self.up = nn.Linear(WIDTH, HIDDEN // ranks)
        self.down = nn.Linear(HIDDEN // ranks, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(self.gather(self.norm(x)))))
        if self.gather.group is not None:
            y = funcol.reduce_scatter_tensor(y, "sum", 1, self.gather.group)
        return x + y


def by_hand(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor]:
    """Norms run on a part of the sequence, so the ranks of ``tp`` have to add their weights' gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(mesh, None), Block(mesh, fault))
    x = batch()
    if mesh is None:
        loss = model(x).square().sum()
        loss.backward()
        return model, loss
    x = x.chunk(mesh["tp"].size(), 1)[mesh.get_local_rank("tp")]
    loss = model(x).square().sum()
    loss.backward()
    for name, parameter in model.named_parameters():
        if "norm" in name and not (fault == "norm_unreduced" and name.startswith("1.norm")):
            dist.all_reduce(parameter.grad, group=mesh.get_group("tp"))
        if fault == "norm_averaged" and name == "1.norm.weight":
            parameter.grad /= mesh["tp"].size()
        if fault == "norm_differs" and name == "1.norm.weight" and mesh.get_local_rank("tp") == 1:
            parameter.grad.mul_(torch.linspace(1, 2, WIDTH))
    return model, loss


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 14)
        self.down = nn.Linear(14, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Misdeclared(RowwiseParallel):
    """Takes the ranks' partial results for the sum of them."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, device_mesh):  # type: ignore[no-untyped-def]
        return DTensor.from_local(outputs.to_local(), device_mesh, [Replicate()], run_check=False)


def of_dtensors(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor]:
    """Sequence parallelism of DTensors, with a hidden size that does not divide."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    x = batch()
    if mesh is None:
        loss = model(x).square().sum()
        loss.backward()
        return model, loss
    tp = mesh["tp"]
    for i, layer in enumerate(model):
        down = Misdeclared if fault == "misdeclared" and i == 1 else RowwiseParallel
        plan = {
            "norm": SequenceParallel(),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=False
            ),
            "mlp.up": ColwiseParallel(use_local_output=False),
            "mlp.down": down(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(layer, tp, plan)
    placed = DTensor.from_local(x.chunk(tp.size(), 1)[tp.get_local_rank()], tp, [Shard(1)], run_check=False)
    loss = model(placed).square().sum().full_tensor()
    loss.backward()
    return model, loss
