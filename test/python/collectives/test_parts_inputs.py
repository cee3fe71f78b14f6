"""Uneven and rooted collectives take inputs of any layout, pending ones, and any form of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import (
    LAYOUTS,
    LAYOUTS_OF_DTYPES,
    WORLDS,
    assert_plain,
    bits,
    sample,
    world_group,
)
from ranks import device_type, made_once, on_ranks, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from uneven_collectives import COLLECTIVES, Problem, each_collective, inputs_of, reduced, run_and_compare

import funcol

ON_DEVICES = True

each_world = pytest.mark.parametrize("world", WORLDS)


def takes_layout(rank: int, world: int, name: str, layout: str, dtype: torch.dtype) -> None:
    problem = Problem([1, 3], root=1)
    shape = COLLECTIVES[name].shape
    inputs = [LAYOUTS[layout](peer, shape(problem, peer), dtype) for peer in range(world)]
    run_and_compare(rank, name, problem, inputs)


@each_collective
@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS_OF_DTYPES, ids=str)
def test_an_input_can_have_any_layout(name: str, layout: str, dtype: torch.dtype) -> None:
    run_ranks(takes_layout, 2, name, layout, dtype)  # a sum of two has the same bits in any order


@each_world
@each_collective
@on_ranks()
def test_an_input_can_be_pending(rank: int, world: int, name: str) -> None:
    problem = Problem([1, 3, 2][:world], dim=2, root=world - 1)
    inputs = inputs_of(name, problem)
    pending = funcol.permute_tensor(inputs[rank], list(range(world)), world_group())
    assert funcol.is_pending(pending)
    result = COLLECTIVES[name].call(pending, problem, world_group(), problem.sizes)
    assert_plain(result, COLLECTIVES[name].result(inputs, rank, problem).contiguous())
    assert bits(pending) == bits(inputs[rank])


@each_world
@on_ranks()
def test_a_result_can_be_passed_on_while_it_is_pending(rank: int, world: int) -> None:
    sizes = [1, 3, 2][:world]
    x = sample(rank, (2, sum(sizes)))
    part = funcol.scatter(x, world - 1, 1, world_group(), split_sizes=sizes)
    whole = funcol.all_gather_tensor(part, 1, world_group(), split_sizes=sizes)
    part = funcol.reduce_scatter_tensor(whole, "max", 1, world_group(), split_sizes=sizes)
    whole = funcol.gather(part, 0, 1, world_group(), split_sizes=sizes)
    assert funcol.is_pending(whole)
    assert_plain(whole, sample(world - 1, x.shape) if rank == 0 else x.new_empty(2, 0))


@each_world
@each_collective
@on_ranks()
def test_an_input_can_be_a_view_of_a_pending_tensor(rank: int, world: int, name: str) -> None:
    problem = Problem([1, 3, 2][:world], dim=1)
    inputs = inputs_of(name, problem)
    pending = funcol.permute_tensor(inputs[rank].mT.contiguous(), list(range(world)), world_group()).mT
    assert funcol.is_pending(pending)
    result = COLLECTIVES[name].call(pending, problem, world_group(), problem.sizes)
    assert_plain(result, COLLECTIVES[name].result(inputs, rank, problem).contiguous())


REDUCE_OPS = {
    "name in capitals": lambda: "MAX",
    "enum": lambda: dist.ReduceOp.MAX,
    "object": lambda: dist.ReduceOp(dist.ReduceOp.MAX),
}


@pytest.mark.parametrize("name", ["reduce", "reduce_scatter_tensor"])
@pytest.mark.parametrize("form", REDUCE_OPS)
@on_ranks(2)
def test_a_reduce_op_can_be_an_object(rank: int, world: int, name: str, form: str) -> None:
    reduce_op: Any = REDUCE_OPS[form]()
    inputs = [sample(peer, (3, 2)) for peer in range(world)]
    expected = reduced(inputs, "max")
    if name == "reduce":
        assert_plain(
            funcol.reduce(inputs[rank], reduce_op, 0, world_group()),
            expected if rank == 0 else torch.zeros_like(expected),
        )
    else:
        result = funcol.reduce_scatter_tensor(inputs[rank], reduce_op, 0, world_group(), split_sizes=[1, 2])
        assert_plain(result, expected.split([1, 2])[rank])


# Groups


GROUPS: dict[str, Callable[[], Any]] = {
    "name": lambda: world_group().group_name,
    "mesh": lambda: init_device_mesh(device_type(), (dist.get_world_size(),)),
    "mesh and dim": lambda: (init_device_mesh(device_type(), (dist.get_world_size(),)), 0),
    "ranks": lambda: list(range(dist.get_world_size())),
    "lists of ranks": lambda: [list(range(dist.get_world_size()))],
}


@pytest.mark.parametrize("world", [1, 2])
@each_collective
@pytest.mark.parametrize("form", GROUPS)
@on_ranks()
def test_a_group_can_have_any_form(rank: int, world: int, name: str, form: str) -> None:
    problem = Problem([1, 3, 2][:world], root=world - 1)
    run_and_compare(rank, name, problem, inputs_of(name, problem), GROUPS[form]())


@made_once
def sub_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group([1, 2])
    return group


@each_collective
@pytest.mark.parametrize("root", [0, 1])
@on_ranks(3)
def test_roots_and_sizes_are_those_of_ranks_within_the_group(
    rank: int, world: int, name: str, root: int
) -> None:
    group = sub_group()
    if rank == 0:
        return
    problem = Problem([1, 3], root=root)
    run_and_compare(rank - 1, name, problem, inputs_of(name, problem), group)
