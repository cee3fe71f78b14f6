"""check_agreement(): ranks that call different things are told, before anything is sent."""

from __future__ import annotations

import gc
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import sample, world_group
from ranks import device_type, on_ranks
from sharded import mesh_of
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import funcol

ON_DEVICES = True

Call = Callable[[int], object]

# name: (what every rank calls, on its own rank; expected parts of the message)
DISAGREEMENTS: dict[str, tuple[Call, list[str]]] = {
    "different ops": (
        lambda rank: (
            funcol.all_reduce(torch.ones(2), "sum", world_group())
            if rank == 0
            else funcol.all_gather_tensor(torch.ones(2), 0, world_group())
        ),
        ["Rank 0 calls all_reduce(sum) with Float [2]", "rank 1 calls all_gather_into_tensor(dim=0)"],
    ),
    "different reduce ops": (
        lambda rank: funcol.all_reduce(torch.ones(2), ["sum", "max"][rank], world_group()),
        ["Rank 0 calls all_reduce(sum)", "rank 1 calls all_reduce(max)"],
    ),
    "different shapes": (
        lambda rank: funcol.all_reduce(torch.ones(2 + rank, 3), "sum", world_group()),
        ["Float [2, 3]", "rank 1 calls all_reduce(sum) with Float [3, 3]"],
    ),
    "different dtypes": (
        lambda rank: funcol.broadcast(torch.ones(2, dtype=[torch.int, torch.float][rank]), 0, world_group()),
        ["broadcast(src=0) with Int [2]", "broadcast(src=0) with Float [2]"],
    ),
    "different dims": (
        lambda rank: funcol.reduce_scatter_tensor(torch.ones(4, 4), "sum", rank, world_group()),
        ["reduce_scatter_tensor(sum, dim=0)", "reduce_scatter_tensor(sum, dim=1)"],
    ),
    "different sources": (
        lambda rank: funcol.scatter(torch.ones(4), rank, 0, world_group()),
        ["scatter(src=0", "scatter(src=1"],
    ),
    "different lists": (
        lambda rank: funcol.all_reduce_coalesced([torch.ones(2)] * (1 + rank), "sum", world_group()),
        ["with Float [2] on cpu; rank 1", "with Float [2] on cpu, Float [2] on cpu"],
    ),
    "different split_sizes": (
        lambda rank: funcol.all_gather_tensor(
            torch.ones(2), 0, world_group(), split_sizes=[[2, 3], [1, 2]][rank]
        ),
        ["split_sizes=[2, 3]", "split_sizes=[1, 2]"],
    ),
    "splits of an exchange that do not fit": (
        lambda rank: funcol.all_to_all_single(
            torch.ones(3, 2), [[1, 2], [2, 2]][rank], [[1, 2], [1, 2]][rank], world_group()
        ),
        ["rank 1 sends 1 rows to rank 0", "expects 2"],
    ),
    "in place": (
        lambda rank: torch.ops.funcol.all_reduce_(torch.ones(2 + rank), "sum", world_group().group_name),
        ["all_reduce_(sum) with Float [2]", "all_reduce_(sum) with Float [3]"],
    ),
}


def parts_of(*layouts: tuple[tuple[int, ...], int]) -> list[DTensor]:
    """Returns a tensor of each shape, cut along the dim beside it."""
    mesh = mesh_of((2,))
    return [distribute_tensor(torch.ones(shape), mesh, [Shard(dim)]) for shape, dim in layouts]


# name: (what rank 0 and what rank 1 redistribute, targets, expected parts of the message)
MANY: dict[str, tuple[list[Any], list[Any], Placement, list[str]]] = {
    "another dim": (
        [((4, 4), 0), ((6, 2), 0)],
        [((4, 4), 1), ((6, 2), 0)],
        Replicate(),
        ["Rank 0 calls redistribute_many(all_gather(dim 0, a) of [4, 4]", "all_gather(dim 1, a) of [4, 4]"],
    ),
    "another order": (
        [((4, 2), 0), ((2, 4), 0)],
        [((2, 4), 0), ((4, 2), 0)],
        Replicate(),
        ["of [4, 2], all_gather(dim 0, a) of [2, 4]", "of [2, 4], all_gather(dim 0, a) of [4, 2]"],
    ),
    "another dim of an exchange": (
        [((4, 4, 4), 0), ((4, 4, 4), 1)],
        [((4, 4, 4), 1), ((4, 4, 4), 0)],
        Shard(2),
        ["all_to_all(dim 0 -> 2, a) of [4, 4, 4], ", "all_to_all(dim 1 -> 2, a) of [4, 4, 4], "],
    ),
}


@pytest.mark.parametrize("name", MANY)
@on_ranks(2)
def test_tensors_that_move_together_are_compared_one_by_one(rank: int, world: int, name: str) -> None:
    *layouts, target, parts = MANY[name]
    tensors = parts_of(*layouts[rank])
    with funcol.check_agreement():
        with pytest.raises(dist.DistBackendError) as raised:
            funcol.redistribute_many(tensors, [[target]] * len(tensors))
        after = funcol.redistribute_many(parts_of(*layouts[0]), [[target]] * len(tensors))
    for part in parts:
        assert part in str(raised.value)
    assert all(tensor.placements == (target,) for tensor in after)


@pytest.mark.parametrize("name", DISAGREEMENTS)
@on_ranks(2)
def test_each_rank_is_told_what_the_others_call(rank: int, world: int, name: str) -> None:
    call, parts = DISAGREEMENTS[name]
    with funcol.check_agreement():
        with pytest.raises(dist.DistBackendError) as raised:
            call(rank)
        after = funcol.all_reduce(torch.ones(2), "sum", world_group())
    for part in parts:
        assert part.replace("on cpu", f"on {device_type()}") in str(raised.value)
    assert after.tolist() == [2.0, 2.0]


@on_ranks(3)
def test_the_first_rank_that_differs_is_named(rank: int, world: int) -> None:
    with funcol.check_agreement(), pytest.raises(dist.DistBackendError, match="; rank 2 calls"):
        funcol.all_reduce(torch.ones(1 + (rank == 2)), "sum", world_group())


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_calls_that_agree_give_what_they_give_unchecked_gradients_too(rank: int, world: int) -> None:
    group = world_group()
    x = sample(rank, (12, 6)).requires_grad_()
    splits = list(range(1, world + 1))

    def calls() -> list[Tensor]:
        return [
            funcol.all_reduce(x, "sum", group),
            funcol.all_gather_tensor(x, 1, group),
            funcol.all_gather_tensor(x[: splits[rank]], 0, group, split_sizes=splits),
            funcol.reduce_scatter_tensor(x, "avg", 1, group),
            funcol.reduce_scatter_tensor(x[: sum(splits)], "sum", 0, group, split_sizes=splits),
            funcol.all_to_all_single(x, None, None, group),
            funcol.all_to_all_single(x[: world * (rank + 1)], splits, [rank + 1] * world, group),
            *funcol.all_to_all(list(x[: sum(splits)].split(splits)), [rank + 1] * world, group),
            funcol.broadcast(x, 0, group),
            funcol.permute_tensor(x, [(r + 1) % world for r in range(world)], group),
            funcol.reduce(x, "sum", 0, group),
            funcol.scatter(x, 0, 0, group),
            funcol.gather(x, 0, 1, group),
            *funcol.all_reduce_coalesced([x, x[0]], "sum", group),
            *funcol.all_gather_into_tensor_coalesced([x, x[0]], group),
            *funcol.reduce_scatter_tensor_coalesced([x, x], "sum", [0, 1], group),
        ]

    def gradient(results: list[Tensor]) -> Tensor:
        return torch.autograd.grad(sum(result.square().sum() for result in results), x)[0]

    expected = calls()
    expected_gradient = gradient(expected)
    with funcol.check_agreement():
        actual = calls()
        actual_gradient = gradient(actual)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    torch.testing.assert_close(actual_gradient, expected_gradient)


@on_ranks(2)
def test_a_rank_that_calls_nothing_is_named_after_the_timeout(rank: int, world: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        message = r"calls all_reduce.*ranks \[1\] called nothing"
        with funcol.check_agreement(), pytest.raises(dist.DistBackendError, match=message):
            funcol.all_reduce(torch.ones(2), "sum", group)


@on_ranks(2)
def test_contexts_nest_and_leave_calls_unchecked(rank: int, world: int) -> None:
    with funcol.check_agreement(), funcol.check_agreement():
        pass
    # Unchecked again: of one rank alone, a call that checks would wait for the other rank.
    if rank == 0:
        funcol.wait_tensor(funcol.isend_inplace(torch.ones(1), 1))
        pending = funcol.all_reduce(torch.ones(1), "sum", world_group())
        assert funcol.is_pending(pending)
    else:
        funcol.wait_tensor(funcol.irecv_inplace(torch.empty(1), 0))
        pending = funcol.all_reduce(torch.ones(1), "sum", world_group())
    assert pending.tolist() == [2.0]


@pytest.mark.long
@on_ranks(2)
def test_each_group_counts_its_calls_anew_in_whatever_memory_it_lies(rank: int, world: int) -> None:
    for _ in range(25):
        group = dist.new_group(list(range(world)), timeout=timedelta(seconds=20))
        with funcol.check_agreement():
            assert funcol.all_reduce(torch.ones(1), "sum", group).item() == world
        dist.destroy_process_group(group)
        if rank > 0:  # so that ranks free groups, whose memory new ones get, at different times
            gc.collect()
