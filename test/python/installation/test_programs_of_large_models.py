"""The building blocks of programs that train large models compute the same with funcol installed."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
import torch.distributed.checkpoint as dcp
from differential import sample, world_group
from programs import WORLDS, Block, computes_the_same, mesh_of
from ranks import on_ranks, run_ranks
from sharded import full
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import funcol

ON_DEVICES = True


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *(grad for grad in grads if grad is not None)]


# Tensor parallelism


class Attention(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(size, size, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = torch.softmax(q @ k.transpose(-1, -2) / 2, dim=-1)
        return self.out((scores @ v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.attention = Attention()
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.attention(self.norm(x)))


def plan(output: Any) -> dict[str, Any]:
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=output),
    }


TOKENS = torch.arange(64).view(4, 16) * 7 % 32


@pytest.mark.parametrize(("world", "output"), [(2, "replicated"), (4, "sharded")])
@computes_the_same()
def test_a_model_in_tensor_and_sequence_parallel(rank: int, world: int, output: str) -> list[Tensor]:
    torch.manual_seed(1)
    layout = Replicate() if output == "replicated" else Shard(-1)
    model = parallelize_module(Model(), mesh_of(world), plan(layout))
    logits = model(TOKENS)
    return [*gradients(model, logits.float().square().mean()), logits.detach()]


@pytest.mark.parametrize("world", WORLDS)
@computes_the_same()
def test_prepared_outputs(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(1)
    parts = {
        "": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0)),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    block = parallelize_module(Block(), mesh_of(world), parts)
    return gradients(block, block(sample(0, [4, 4, 8])).square().mean())


@computes_the_same(4)
def test_fully_shard_over_tensor_parallel_with_adamw(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(1)
    mesh = mesh_of(2, 2)
    model = parallelize_module(Model(), mesh["tp"], plan(Replicate()))
    fully_shard(model.attention, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    losses = []
    for _ in range(2):
        loss = model(TOKENS[rank // 2 :: 2]).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach(), full(norm)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


# Optimizers

OPTIMIZERS: dict[str, Any] = {
    "adamw, foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adam, fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "adam, one by one": lambda params: torch.optim.Adam(params, lr=0.1, foreach=False),
    "sgd, foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
@computes_the_same()
def test_an_optimizer(rank: int, world: int, name: str) -> list[Tensor]:
    mesh = mesh_of(world)
    weights = [
        nn.Parameter(distribute_tensor(sample(i, shape), mesh, [placement]))
        for i, (shape, placement) in enumerate([([8, 6], Shard(0)), ([5, 3], Shard(0)), ([4], Replicate())])
    ]
    optimizer = OPTIMIZERS[name](weights)
    for step in range(2):
        for i, weight in enumerate(weights):
            weight.grad = distribute_tensor(sample(10 * step + i, weight.shape), mesh, weight.placements)
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    return [weight.detach() for weight in weights]


# Experts


@pytest.mark.parametrize("world", WORLDS)
@computes_the_same()
def test_tokens_that_go_to_experts_and_back(rank: int, world: int) -> list[Tensor]:
    """Exchanges tokens with experts: every rank has one, and sends each a part of its tokens."""
    group, mesh = world_group(), mesh_of(world)
    experts = nn.Parameter(distribute_tensor(sample(7, [world, 8, 8]), mesh, [Shard(0)]))
    x = sample(rank, [2 * world, 8]).requires_grad_()
    received = stock.all_to_all_single_autograd(x, None, None, group)
    computed = torch.tanh(received @ experts.to_local()[0])
    result = stock.all_to_all_single_autograd(computed, None, None, group)
    result.square().sum().backward()
    assert x.grad is not None
    assert experts.grad is not None
    return [result.detach(), x.grad, experts.grad]


# Checkpoints of activations, and of models


@pytest.mark.parametrize(("world", "reentrant"), [(2, False), (4, True)])
@computes_the_same()
def test_activation_checkpointing(rank: int, world: int, reentrant: bool) -> list[Tensor]:
    torch.manual_seed(1)
    parts = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    block = parallelize_module(Block(), mesh_of(world), parts)
    x = sample(0, [2, 4, 8]).requires_grad_()
    return gradients(block, checkpoint(block, x, use_reentrant=reentrant).square().mean())


@pytest.mark.parametrize("world", WORLDS)
@computes_the_same(pends=False)
def test_activation_checkpointing_of_fully_sharded_blocks(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(*(checkpoint_wrapper(Block()) for _ in range(2)))
    for block in model:
        fully_shard(block, mesh=mesh_of(world))
    fully_shard(model, mesh=mesh_of(world))
    return gradients(model, model(sample(rank, [2, 4, 8])).square().mean())


def sharded_model(world: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block())
    fully_shard(model, mesh=mesh_of(world))
    return model


def passes_on_a_checkpoint(rank: int, world: int, folder: str, saves_with: bool) -> None:
    """Saved without funcol and loaded with it, or the other way round."""
    model = sharded_model(world, seed=1)

    def save() -> None:
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)

    def load() -> list[Tensor]:
        other = sharded_model(world, seed=2)
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state)
        return [full(parameter) for parameter in other.parameters()]

    if saves_with:
        with funcol.installed():
            save()
        loaded = load()
    else:
        save()
        with funcol.installed():
            loaded = load()
    torch.testing.assert_close(loaded, [full(parameter) for parameter in model.parameters()])


@pytest.mark.parametrize(("world", "saves_with"), [(2, True), (4, False)])
def test_a_distributed_checkpoint(world: int, saves_with: bool) -> None:
    folder = tempfile.mkdtemp()
    try:
        run_ranks(passes_on_a_checkpoint, world, folder, saves_with)
        assert any(Path(folder).iterdir())
    finally:
        shutil.rmtree(folder)


# Programs that PyTorch itself does not support


@pytest.mark.cpu_only
@pytest.mark.parametrize(("world", "placement"), [(2, None), (4, 0), (2, 1)])
@on_ranks()
def test_attention_on_the_cpu(rank: int, world: int, placement: int | None) -> None:
    mesh = mesh_of(world)
    layout = Replicate() if placement is None else Shard(placement)
    plain = [sample(i, [4, 4, 8, 4]).requires_grad_() for i in range(3)]
    placed = [distribute_tensor(x.detach(), mesh, [layout]).requires_grad_() for x in plain]
    expected = functional.scaled_dot_product_attention(*plain, is_causal=True)
    expected.square().sum().backward()
    with funcol.installed():
        result = functional.scaled_dot_product_attention(*placed, is_causal=True)
        result.square().sum().backward()
    assert isinstance(result, DTensor)
    assert result.placements == (layout,)
    torch.testing.assert_close(result.full_tensor(), expected)
    for x, y in zip(placed, plain, strict=True):
        assert x.grad is not None
        torch.testing.assert_close(full(x.grad), y.grad)


@pytest.mark.cpu_only
@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_context_parallel_attention_on_the_cpu(rank: int, world: int) -> None:
    torch.manual_seed(0)
    inputs = [sample(i, [2, 2, 4 * world, 4]) for i in range(3)]
    weight = sample(9, [4, 4]).requires_grad_()
    functional.scaled_dot_product_attention(
        *(x @ weight for x in inputs), is_causal=True
    ).square().sum().backward()
    mine = weight.detach().clone().requires_grad_()
    mesh = mesh_of(world)
    with funcol.installed(), context_parallel(mesh, buffers=inputs, buffer_seq_dims=[2, 2, 2]):
        assert inputs[0].shape[2] == 4
        result = functional.scaled_dot_product_attention(*(x @ mine for x in inputs), is_causal=True)
        assert result.shape[2] == 4
        result.square().sum().backward()
    assert mine.grad is not None
    dist.all_reduce(mine.grad)
    torch.testing.assert_close(mine.grad, weight.grad, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_a_pending_redistribution_that_goes_into_a_compiled_region(rank: int, world: int) -> None:
    mesh = mesh_of(world)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        return (x * 2).sin()

    with funcol.installed():
        x = distribute_tensor(sample(0, [4, 6]), mesh, [Shard(0)]).requires_grad_()
        local = x.redistribute(placements=[Replicate()], async_op=True).to_local()
        compiled(local).sum().backward()
        assert x.grad is not None
        expected = 2 * (2 * sample(0, [4, 6])).cos()
        torch.testing.assert_close(full(x.grad), expected)
