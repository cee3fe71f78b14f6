"""FSDP2 under funcol on CUDA devices: its streams are ordered, and its numbers are those of the CPU."""

import pytest
import torch
from ranks import device_type, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import funcol

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_devices")]

WORLD = 2
NUM_STEPS = 3


def trained(rank, world, reshard):
    mesh = init_device_mesh(device_type(), (world,))
    torch.manual_seed(1)
    blocks = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False)) for _ in range(4))
    model = nn.Sequential(*blocks)
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(NUM_STEPS):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.full_tensor() for parameter in model.parameters())]


def trains_as_stock(rank, world, reshard):
    expected = trained(rank, world, reshard)
    with funcol.installed():
        actual = trained(rank, world, reshard)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_a_step_of_fsdp2_orders_its_streams(reshard):
    run_ranks(trains_as_stock, WORLD, reshard)
