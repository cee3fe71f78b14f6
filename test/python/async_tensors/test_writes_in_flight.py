"""Writes to the tensors of a collective in flight, by the rule in csrc/async/pending_collective.h.

In each case rank 0 starts its collective, then writes to all the memory that the rule allows, and only then
lets rank 1, whose collective completes it, start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from differential import world_group
from ranks import device_type, on_ranks, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

import funcol

ON_DEVICES = True

NUM_ROWS = 2**10
SIZE = (2 * NUM_ROWS, 64)


def as_a_late_peer(rank: int, act: Callable[[], Any]) -> Any:
    """Runs ``act`` on both ranks; on rank 1 once rank 0 is back from it."""
    store = dist.distributed_c10d._get_default_store()
    as_a_late_peer.calls += 1  # type: ignore[attr-defined]
    key = f"back {as_a_late_peer.calls} {dist.get_world_size()}"  # type: ignore[attr-defined]
    if rank == 0:
        result = act()
        store.set(key, "yes")
        return result
    store.wait([key])
    return act()


as_a_late_peer.calls = 0  # type: ignore[attr-defined]


def own(rank: int, *size: int) -> Tensor:
    return torch.arange(rank, rank + torch.Size(size).numel(), dtype=torch.float32).view(size)


FORWARD: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: funcol.all_reduce(x, "sum", world_group()),
    "all_reduce_coalesced": lambda x: funcol.all_reduce_coalesced([x, x], "sum", world_group()),
    "broadcast": lambda x: funcol.broadcast(x, 0, world_group()),
    "reduce": lambda x: funcol.reduce(x, "sum", 0, world_group()),
    "all_gather, dim 1": lambda x: funcol.all_gather_tensor(x, 1, world_group()),
    "all_gather, dim 1, ranks in order": lambda x: funcol.all_gather_tensor(x.view(1, -1), 1, world_group()),
    "reduce_scatter, dim 1": lambda x: funcol.reduce_scatter_tensor(x, "sum", 1, world_group()),
    "reduce_scatter, dim 1, ranks in order": lambda x: funcol.reduce_scatter_tensor(
        x.view(1, -1), "sum", 1, world_group()
    ),
    "reduce_scatter_coalesced, dim 1, ranks in order": lambda x: funcol.reduce_scatter_tensor_coalesced(
        [x.view(1, -1)], "sum", [1], world_group()
    ),
    "all_gather, split_sizes": lambda x: funcol.all_gather_tensor(
        x[: NUM_ROWS + dist.get_rank()], 0, world_group(), split_sizes=[NUM_ROWS, NUM_ROWS + 1]
    ),
    "reduce_scatter, split_sizes": lambda x: funcol.reduce_scatter_tensor(
        x, "sum", 0, world_group(), split_sizes=[NUM_ROWS - 1, NUM_ROWS + 1]
    ),
    "scatter": lambda x: funcol.scatter(x, 0, 0, world_group()),
    "gather": lambda x: funcol.gather(x, 1, 0, world_group()),
}


def values_of(result: Any) -> list[Tensor]:
    return [value + 0 for value in (result if isinstance(result, list) else [result])]


@pytest.mark.parametrize("name", FORWARD)
@on_ranks(2)
def test_an_input_may_be_written_to_after_the_call(rank: int, world: int, name: str) -> None:
    expected = values_of(FORWARD[name](own(rank, *SIZE)))

    def act() -> list[Tensor]:
        x = own(rank, *SIZE)
        result = FORWARD[name](x)
        x.fill_(-1)
        return result if isinstance(result, list) else [result]

    result = as_a_late_peer(rank, act)
    assert all(torch.equal(got, want) for got, want in zip(result, expected, strict=True))


MOVES: dict[str, tuple[Placement, Placement]] = {
    "S1 to S0": (Shard(1), Shard(0)),
    "S0 to S1": (Shard(0), Shard(1)),
}


@pytest.mark.parametrize("name", MOVES)
@on_ranks(2)
def test_a_shard_may_be_written_to_after_a_redistribution_was_started(
    rank: int, world: int, name: str
) -> None:
    mesh = init_device_mesh(device_type(), (world,))
    src, dst = MOVES[name]

    def move(local: Tensor) -> DTensor:
        return funcol.redistribute(DTensor.from_local(local, mesh, [src]), placements=[dst], async_op=True)

    expected = move(own(rank, *SIZE)).to_local() + 0

    def act() -> DTensor:
        local = own(rank, *SIZE)
        moved = move(local)
        local.fill_(-1)
        return moved

    assert torch.equal(as_a_late_peer(rank, act).to_local(), expected)


# Calls whose backward passes are collectives that read the gradient itself. Of a leaf with the stated number
# of rows, in units of NUM_ROWS, the result has SIZE.
BACKWARD: dict[str, tuple[int, Callable[[Any, Tensor], Tensor]]] = {
    "all_to_all": (2, lambda module, x: module.all_to_all_single(x, None, None, world_group())),
    "all_gather": (1, lambda module, x: module.all_gather_tensor(x, 0, world_group())),
    "reduce_scatter": (4, lambda module, x: module.reduce_scatter_tensor(x, "sum", 0, world_group())),
    "permute": (2, lambda module, x: module.permute_tensor(x, [1, 0], world_group())),
}
OF_FUNCOL: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "reduce_scatter, ranks in order": (
        4,
        lambda x: funcol.reduce_scatter_tensor(x.view(1, -1), "sum", 1, world_group()).view(SIZE),
    ),
    "all_gather_coalesced": (1, lambda x: funcol.all_gather_into_tensor_coalesced([x], world_group())[0]),
    "reduce_scatter_coalesced": (
        4,
        lambda x: funcol.reduce_scatter_tensor_coalesced([x], "sum", [0], world_group())[0],
    ),
    "all_gather_inplace": (
        1,
        lambda x: funcol.all_gather_tensor_inplace(torch.empty(SIZE), x, group=world_group()),
    ),
}


def rows_and_function(name: str, installed: bool) -> tuple[int, Callable[[Tensor], Tensor]]:
    if name in OF_FUNCOL:
        rows, function_of_funcol = OF_FUNCOL[name]
        return rows * NUM_ROWS, function_of_funcol
    rows, function = BACKWARD[name]
    module = stock if installed else funcol
    return rows * NUM_ROWS, lambda x: function(module, x)


def writes_to_a_gradient(
    name: str, write: str, installed: bool, act_on: Callable[..., Any], rank: int
) -> Tensor:
    """Returns the gradient of ``x``; another gradient's memory is written to as soon as backward returns."""
    rows, function = rows_and_function(name, installed)
    x = own(rank, rows, SIZE[1]).requires_grad_()
    weight = own(rank, *SIZE).requires_grad_()
    with funcol.installed() if installed else contextlib.nullcontext():
        result = function(x)
        total = result + weight.view_as(weight)
        seen: list[Tensor] = []
        if write == "a hook's":
            total.register_hook(seen.append)

        def act() -> None:
            if write == "an intermediate":
                seen.extend(torch.autograd.grad(total, [total, x], own(rank, *SIZE)))
                x.grad = seen.pop()
            else:
                total.backward(own(rank, *SIZE))
            for written in seen or [weight.grad]:
                assert written is not None
                written.fill_(-1)

        act_on(rank, act)
    assert x.grad is not None
    return x.grad + 0


def at_once(rank: int, act: Callable[[], None]) -> None:
    act()


def keeps_a_gradient(rank: int, world: int, name: str, write: str, installed: bool) -> None:
    rows, function = rows_and_function(name, installed=False)
    x = own(rank, rows, SIZE[1]).requires_grad_()
    function(x).backward(own(rank, *SIZE))
    assert x.grad is not None
    got = writes_to_a_gradient(name, write, installed, as_a_late_peer, rank)
    assert torch.equal(got, x.grad)


@pytest.mark.parametrize("installed", [False, True], ids=["funcol", "installed"])
@pytest.mark.parametrize("write", ["a .grad", "a hook's", "an intermediate"])
@pytest.mark.parametrize("name", BACKWARD)
def test_a_gradient_may_be_written_to_after_backward(name: str, write: str, installed: bool) -> None:
    run_ranks(keeps_a_gradient, 2, name, write, installed, timeout=20)


@pytest.mark.parametrize("write", ["a .grad", "a hook's", "an intermediate"])
@pytest.mark.parametrize("name", OF_FUNCOL)
def test_a_gradient_of_other_forms_may_be_written_to_after_backward(name: str, write: str) -> None:
    run_ranks(keeps_a_gradient, 2, name, write, False, timeout=20)


@on_ranks(2)
def test_autograd_may_add_to_a_gradient_in_place_while_a_collective_reads_it(rank: int, world: int) -> None:
    def gradients(act_on: Callable[..., Any]) -> list[Tensor]:
        x, weight = (own(rank, *SIZE).requires_grad_() for _ in range(2))
        sent = funcol.all_to_all_single(x, None, None, world_group())
        total = 2 * weight + (
            sent + weight.view_as(weight)
        )  # the second part of weight.grad is added in place
        act_on(rank, lambda: total.backward(own(rank, *SIZE)))
        assert x.grad is not None
        assert weight.grad is not None
        return [x.grad + 0, weight.grad]

    expected = gradients(at_once)
    assert all(map(torch.equal, gradients(as_a_late_peer), expected))
