"""States of optimizers with whole tensors, out of sharded models and into them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import device_type, on_ranks, run_ranks
from sharded import mesh_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from funcol import (
    full_optimizer_state_dict,
    full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)

ON_DEVICES = True

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9)),
    "fused Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


def model_of(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)).to(device_type())
    if kind == "plain":
        return model
    mesh = mesh_of((2, 2))
    if kind == "fsdp and tensor parallel":
        parallelize_module(model, mesh["b"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in model:
        fully_shard(layer, mesh=mesh["a"] if "tensor" in kind else mesh_of((4,)))
    return model


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    decayed = [value for name, value in model.named_parameters() if "weight" in name]
    rest = [value for name, value in model.named_parameters() if "weight" not in name]
    made: torch.optim.Optimizer = OPTIMIZERS[kind](
        [{"params": decayed, "weight_decay": 0.5}, {"params": rest}]
    )
    return made


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator("cpu").manual_seed(step)
        x = torch.rand(4, 5, generator=generator, device="cpu").to(device_type())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    assert one["param_groups"] == other["param_groups"]
    for parameter, values in other["state"].items():
        assert one["state"][parameter].keys() == values.keys()
        for key, value in values.items():
            if isinstance(value, Tensor):
                assert type(one["state"][parameter][key]) is Tensor
                assert torch.equal(one["state"][parameter][key].cpu(), value.cpu()), (parameter, key)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["plain", "fsdp", "fsdp and tensor parallel"])
@on_ranks(4)
def test_states_are_those_of_pytorch_and_come_back(rank: int, world: int, kind: str, name: str) -> None:
    model = model_of(kind, 1)
    optimizer = optimizer_of(model, name)
    train(model, optimizer, range(3))
    options = StateDictOptions(full_state_dict=True)
    expected = get_optimizer_state_dict(model, optimizer, options=options)
    state = full_optimizer_state_dict(model, optimizer, to=1, bucket_bytes=100)
    assert bool(state) == (rank == 1)
    if rank == 1:
        same(state, expected)
    weights = full_state_dict(model, to=1)

    other = model_of("fsdp" if kind != "fsdp" else "fsdp and tensor parallel", 2)
    again = optimizer_of(other, name)
    for group in again.param_groups:
        group["lr"] = 7.0
    load_full_state_dict(other, weights if rank == 1 else None, src=1)
    load_full_optimizer_state_dict(other, again, state if rank == 1 else None, src=1, bucket_bytes=100)
    same(
        full_optimizer_state_dict(other, again, to=None), full_optimizer_state_dict(model, optimizer, to=None)
    )
    assert [group["lr"] for group in again.param_groups] == [group["lr"] for group in optimizer.param_groups]
    # Both train on alike, and results have memory of their own.
    kept = {} if rank != 1 else {key: value.clone() for key, value in state["state"]["0.weight"].items()}
    train(model, optimizer, range(3, 5))
    train(other, again, range(3, 5))
    ours, theirs = full_state_dict(other, to=None), full_state_dict(model, to=None)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value)
    assert all(torch.equal(state["state"]["0.weight"][key], value) for key, value in kept.items())


def refuses(rank: int, world: int, which: str) -> tuple[str, str]:
    model = model_of("fsdp", 1)
    optimizer = optimizer_of(model, "AdamW")
    state: Any = full_optimizer_state_dict(model, optimizer, to=0)
    if rank == 0:
        match which:
            case "state":
                del state["state"]["1.bias"]
            case "group":
                state["param_groups"][1]["params"].remove("1.bias")
            case "option":
                state["param_groups"][1]["lr"] = object()
            case "none":
                state = None
    try:
        load_full_optimizer_state_dict(model, optimizer, state)
    except Exception as error:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world
        assert all(isinstance(value, DTensor) for value in model.parameters())
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("which", "kind", "complaint"),
    [
        (
            "state",
            "ValueError",
            "'1.bias.step', '1.bias.exp_avg', '1.bias.exp_avg_sq' of the model is missing",
        ),
        ("group", "ValueError", "'1.bias' is in no group of the state"),
        ("option", "TypeError", "option 'lr' of a group is a object, expected a number"),
        ("none", "ValueError", "no tensors on the rank that is to send them"),
    ],
)
def test_wrong_states_are_refused_on_all_ranks(which: str, kind: str, complaint: str) -> None:
    (error, message), *others = run_ranks(refuses, 4, which)
    assert error == kind
    assert complaint in message
    assert all(error == "RuntimeError" and "rank 0 left after 0 tensors" in text for error, text in others)
