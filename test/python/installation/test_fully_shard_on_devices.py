"""FSDP2 under funcol on CUDA devices: its streams are ordered, and its numbers are those of the CPU."""

import pytest
import torch
from fsdp_checks import assert_same
from fsdp_programs import Block, Fails, batch, blocks, copies, sharded, state
from programs import settled
from ranks import device_type, on_ranks, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import funcol

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_devices")]

WORLD = 2
NUM_STEPS = 3

from_2_15 = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="PyTorch's own FSDP2 uses memory there that nothing orders"
)


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


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@on_ranks(WORLD)
def test_a_step_of_fsdp2_orders_its_streams(rank, world, reshard):
    expected = trained(rank, world, reshard)
    with funcol.installed():
        actual = trained(rank, world, reshard)
    torch.testing.assert_close(actual, expected)


def on_this_host(tensors):
    """Copies on the CPU: the parameters of an offloaded model are there, the losses are not."""
    return [tensor.cpu() for tensor in tensors]


def offloads(rank, world, pins, accumulates):
    model = sharded(blocks(), offload_policy=CPUOffloadPolicy(pin_memory=pins))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found = []
    for step in range(2 * NUM_STEPS):
        is_last = step % 2 == 1 or not accumulates
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        found += on_this_host([loss.detach(), *settled(copies(state(model)))])
        if is_last:
            assert all(p.grad.device.type == "cpu" for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
    return found


def replicates_and_accumulates(rank, world):
    """Two groups of ranks have the same shards; every other step only scatters gradients."""
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(blocks(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(2 * NUM_STEPS):
        is_last = step % 2 == 1
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last)
        model(batch(rank, step)).square().mean().backward()
        if is_last:
            found += settled(copies(state(model)))
            optimizer.step()
            optimizer.zero_grad()
    return found


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("a backward pass that fails")


def goes_on_after_errors(rank, world):
    """A forward pass fails in one step, a backward pass in another; the steps after them are as others."""
    torch.manual_seed(1)
    model = sharded(nn.Sequential(Block(), Fails(), Block()))
    found = []
    for step in range(2 * NUM_STEPS):
        model[1].fails = step == 1
        try:
            result = model(batch(rank, step))
            (FailsBackward.apply(result) if step == 3 else result).square().mean().backward()
        except ValueError:
            for module in model:
                module.reshard()
        else:
            found += settled(copies(state(model)))
        model.zero_grad()
    return found


def hooks_see_gradients(rank, world):
    """Hooks read each reduced gradient on the current stream as soon as there is one."""
    model = sharded(blocks())
    found = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: found.append(parameter.grad.to_local() * 2)
        )
    for step in range(NUM_STEPS):
        model(batch(rank, step)).square().mean().backward()
    return settled(found)


def does_as_stock(rank, world, program, *options):
    expected = globals()[program](rank, world, *options)
    with funcol.installed():
        found = globals()[program](rank, world, *options)
    assert_same(found, expected)


@from_2_15
@pytest.mark.parametrize("accumulates", [False, True], ids=["each step", "every other step"])
@pytest.mark.parametrize("pins", [False, True], ids=["pageable", "pinned"])
def test_parameters_and_gradients_that_are_offloaded_are_those_of_stock(pins, accumulates):
    run_ranks(does_as_stock, WORLD, "offloads", pins, accumulates)


@from_2_15
def test_replicas_that_accumulate_gradients_have_those_of_stock():
    run_ranks(does_as_stock, 4, "replicates_and_accumulates")


@from_2_15
def test_steps_after_a_failed_one_are_those_of_stock():
    run_ranks(does_as_stock, WORLD, "goes_on_after_errors")


@from_2_15
def test_hooks_see_the_gradients_of_stock():
    run_ranks(does_as_stock, WORLD, "hooks_see_gradients")
