"""``ColwiseParallel`` and ``RowwiseParallel`` layers with features that do not divide, under
``funcol.install()``, against the model on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import funcol


class Layers(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.up = nn.Linear(4, num_features)
        self.down = nn.Linear(num_features, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) + 0


def trains_like_one_device(rank: int, world: int, num_features: int, num_replicas: int) -> None:
    mesh = init_device_mesh("cpu", (num_replicas, world // num_replicas), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Layers(num_features)
    model = copy.deepcopy(plain)
    x = torch.randn(4, 3, 4)
    with funcol.installed():
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if num_replicas > 1:
            fully_shard(model, mesh=mesh["dp"])
        for net, inputs in ((model, x.chunk(num_replicas)[mesh.get_local_rank("dp")]), (plain, x)):
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                (net(inputs).square().sum() / (1 if net is model else num_replicas)).backward()
                optimizer.step()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            assert isinstance(ours.grad, DTensor)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=name)
            torch.testing.assert_close(ours.detach().full_tensor(), theirs.detach(), msg=name)


@pytest.mark.parametrize("num_features", [1, 7])
@pytest.mark.parametrize("world", [2, 3])
def test_tensor_parallel_layers(world: int, num_features: int) -> None:
    run_ranks(trains_like_one_device, world, num_features, 1)


@pytest.mark.parametrize("num_features", [1, 7])
def test_tensor_parallel_layers_under_fsdp2(num_features: int) -> None:
    run_ranks(trains_like_one_device, 4, num_features, 2)


@on_ranks(2)
def test_a_compiled_model(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Layers(7)
    expected = model(torch.ones(2, 4)).detach()
    with funcol.installed():
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        result = torch.compile(model, backend="aot_eager")(torch.ones(2, 4))
    torch.testing.assert_close(result.detach(), expected)
