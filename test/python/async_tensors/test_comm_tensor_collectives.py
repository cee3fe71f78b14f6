"""CommTensors and the eight in-place collectives on real ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from differential import WORLDS
from in_place import STARTS, expected, is_supported, own_input
from ranks import on_ranks, run_ranks
from slow_collectives import same
from torch import Tensor

import funcol

ON_DEVICES = True

EIGHT = pytest.mark.parametrize("name", STARTS)


def starts_and_uses(rank: int, world: int, name: str, rows: int, order: str) -> bool:
    """Starts a collective and reads its outputs, before or after a wait for the Work, as ``order`` says.

    Returns False if the backend lacks the collective.
    """
    if not is_supported(name):
        return False
    outputs, work = STARTS[name](own_input(rank, world, rows), rank, world, funcol.collectives.CommTensor)
    assert all(map(funcol.is_pending, outputs))
    if order == "work_first":
        work.wait()
    assert same([output + 0 for output in outputs], expected(name, rank, world, rows))
    assert not any(map(funcol.is_pending, outputs))
    if order == "use_first":
        work.wait()
    return True


def run_or_skip(supported: list[bool]) -> None:
    if not all(supported):
        pytest.skip("this gloo lacks the collective")


@EIGHT
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_the_outputs_wait_by_themselves(name: str, world: int, rows: int) -> None:
    run_or_skip(run_ranks(starts_and_uses, world, name, rows, "use_only"))


@EIGHT
@pytest.mark.parametrize("order", ["work_first", "use_first"])
def test_the_work_may_be_waited_for_too(name: str, order: str) -> None:
    run_or_skip(run_ranks(starts_and_uses, 2, name, 2, order))


def outputs_in_a_row(rank: int, world: int, name: str) -> bool:
    if not is_supported(name):
        return False
    first, _ = STARTS[name](own_input(rank, world, 2), rank, world, funcol.collectives.CommTensor)
    second, _ = STARTS[name](own_input(rank, world, 2, 50), rank, world, funcol.collectives.CommTensor)
    assert same([output + 0 for output in second], expected(name, rank, world, 2, 50))
    assert same([output + 0 for output in first], expected(name, rank, world, 2))
    return True


@EIGHT
def test_two_may_run_at_once_and_be_used_in_any_order(name: str) -> None:
    run_or_skip(run_ranks(outputs_in_a_row, 3, name))


@on_ranks(2)
def test_starting_and_viewing_do_not_wait_for_other_ranks(rank: int, world: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    tensor = funcol.collectives.CommTensor(torch.ones(4, 3))
    if rank == 1:
        store.wait(["the other rank has made its views"])
    dist.all_reduce(tensor, async_op=True)
    view = tensor.t().reshape(3, 2, 2)
    if rank == 0:
        store.set("the other rank has made its views", "")
    assert same(view + 0, torch.full((3, 2, 2), 2.0))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("use_between", [False, True])
@on_ranks()
def test_one_tensor_may_be_handed_to_many_collectives(rank: int, world: int, use_between: bool) -> None:
    tensor = funcol.collectives.CommTensor(torch.ones(5))
    for round_ in range(1, 5):
        dist.all_reduce(tensor, async_op=True)
        if use_between:
            assert same(tensor + 0, torch.full((5,), float(world) ** round_))
    assert same(tensor + 0, torch.full((5,), float(world) ** 4))


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_parts_of_one_tensor_may_be_in_different_collectives(rank: int, world: int) -> None:
    whole = funcol.collectives.CommTensor(torch.arange(10.0))
    for part in whole.split(3):
        dist.all_reduce(part, async_op=True)
    assert same(whole * 1, torch.arange(10.0) * world)


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_a_synchronous_call_is_as_on_a_plain_tensor(rank: int, world: int) -> None:
    tensor = funcol.collectives.CommTensor(torch.ones(3))
    dist.all_reduce(tensor)
    assert same(tensor + 0, torch.full((3,), float(world)))


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_the_collective_writes_into_the_wrapped_tensor(rank: int, world: int) -> None:
    x = torch.ones(3)
    tensor = funcol.collectives.CommTensor(x)
    dist.all_reduce(tensor, async_op=True)
    funcol.wait_tensor(tensor)
    assert same(x, torch.full((3,), float(world)))


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_a_dropped_result_leaves_the_ranks_in_step(rank: int, world: int) -> None:
    dist.all_reduce(funcol.collectives.CommTensor(torch.ones(3)), async_op=True)


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_gradients_are_reduced_in_place(rank: int, world: int) -> None:
    weight = torch.ones(3, requires_grad=True)
    (weight * (rank + 1)).sum().backward()
    assert weight.grad is not None
    gradient = funcol.collectives.CommTensor(weight.grad)
    dist.all_reduce(gradient, async_op=True)
    with torch.no_grad():
        weight -= gradient
    assert same(weight.detach(), torch.full((3,), 1.0 - sum(range(1, world + 1))))


def double(x: Tensor) -> Tensor:
    return x * 2


def reduce_then_double(x: Tensor) -> Tensor:
    tensor = funcol.collectives.CommTensor(x + 0)
    dist.all_reduce(tensor, async_op=True)
    return tensor * 2


def is_used_by_a_compiled_function(rank: int, world: int) -> None:
    tensor = funcol.collectives.CommTensor(torch.ones(3))
    dist.all_reduce(tensor, async_op=True)
    compiled = torch.compile(double, backend="eager")
    assert same(compiled(tensor), torch.full((3,), 2.0 * world))


def is_made_in_a_compiled_function(rank: int, world: int) -> None:
    compiled = torch.compile(reduce_then_double, backend="eager")
    assert same(compiled(torch.ones(3)), torch.full((3,), 2.0 * world))


@pytest.mark.parametrize("program", [is_used_by_a_compiled_function, is_made_in_a_compiled_function])
def test_compiled_functions_see_finished_data(program: Callable[[int, int], None]) -> None:
    run_ranks(program, 2)
