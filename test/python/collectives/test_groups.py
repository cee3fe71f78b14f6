"""Names of a collective's ranks: every form of a group, sub-groups, groups that come and go."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
import torch.distributed.distributed_c10d as c10d
from differential import DIMS, DTYPES, PROGRAM_SHAPE, PROGRAMS, assert_same, finished, sample, world_group
from group_forms import FORMS, FORMS_OF_ALL_RANKS, FORMS_OF_SOME_RANKS, all_ranks, square
from ranks import device_type, made_once, on_ranks, rejoin, run_ranks
from torch import Tensor
from torch.utils._pytree import tree_map

import funcol

ON_DEVICES = True

each_function = pytest.mark.parametrize("function", PROGRAMS)


@made_once
def tagged_group() -> dist.ProcessGroup:
    """Returns a group of all ranks once more, with the tag "twin"."""
    return c10d._new_group_with_tag(all_ranks(), pg_tag="twin")


# Stock PyTorch cannot exchange complex numbers, but what is only moved may be called by any name.
ONLY_MOVED = {"all_to_all_single", "permute_tensor", "all_gather_into_tensor_coalesced"}

# Over NCCL, stock PyTorch's coalesced sums of complex numbers raise "Unsupported tensor data type".
SUMMED_AS_NUMBERS = {"all_reduce_coalesced", "reduce_scatter_tensor_coalesced"}


def expected_of(function: str, x: Tensor, *args: Any, **dim: int) -> Tensor | list[Tensor]:
    if function in ONLY_MOVED and x.dtype == torch.complex64:
        results = PROGRAMS[function](stock, x.view(torch.float64), *args, **dim)
        return tree_map(lambda result: result.view(x.dtype), finished(results))
    if function in SUMMED_AS_NUMBERS and x.is_complex() and x.is_cuda:
        dims = {name: number % x.dim() for name, number in dim.items()}
        results = PROGRAMS[function](stock, torch.view_as_real(x), *args, **dims)
        return tree_map(torch.view_as_complex, finished(results))
    return finished(PROGRAMS[function](stock, x, *args, **dim))


def agrees_in_form(rank: int, world: int, function: str, form: str, tag: tuple[str, ...]) -> None:
    group, expected_group = FORMS[form]()
    size = expected_group.size()
    dims = [{"dim": dim} for dim in DIMS.get(function, [])] or [{}]
    for dtype, dim in itertools.product(DTYPES, dims):
        x = sample(rank, PROGRAM_SHAPE, dtype)
        expected = expected_of(function, x, size, expected_group, **dim)
        assert_same(PROGRAMS[function](funcol, x, size, group, *tag, **dim), expected)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world", [1, 2, 3])
@each_function
@pytest.mark.parametrize("form", FORMS_OF_ALL_RANKS)
def test_each_function_takes_each_form_of_all_ranks_dtype_and_dim(
    world: int, function: str, form: str
) -> None:
    run_ranks(agrees_in_form, world, function, form, ())


@pytest.mark.sampled(4)
@each_function
@pytest.mark.parametrize("form", FORMS_OF_SOME_RANKS)
def test_each_function_takes_each_form_of_some_ranks_dtype_and_dim(function: str, form: str) -> None:
    run_ranks(agrees_in_form, 4, function, form, ())


@each_function
@pytest.mark.parametrize("form", ["group", "name", "mesh"])
def test_a_tag_changes_nothing_for_a_group_that_is_not_a_list(function: str, form: str) -> None:
    run_ranks(agrees_in_form, 2, function, form, ("any",))


@each_function
@pytest.mark.parametrize("tag", ["", "twin"])
@on_ranks(2)
def test_a_tag_tells_groups_of_the_same_ranks_apart(rank: int, world: int, function: str, tag: str) -> None:
    twin = tagged_group()
    expected = twin if tag else world_group()
    assert funcol.groups.resolve_group(all_ranks(), tag) is expected
    x = sample(rank, PROGRAM_SHAPE)
    result = finished(PROGRAMS[function](stock, x, world, expected))
    assert_same(PROGRAMS[function](funcol, x, world, all_ranks(), tag), result)


def warns(rank: int, world: int, form: str) -> list[str]:
    group, _ = FORMS[form]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        funcol.wait_tensor(funcol.all_reduce(torch.ones(1), "sum", group))
    return [f"{warning.category.__name__} at {warning.filename}" for warning in caught]


@pytest.mark.parametrize("form", ["ranks", "lists of ranks"])
def test_naming_a_group_by_its_ranks_warns_at_the_caller(form: str) -> None:
    assert run_ranks(warns, 1, form) == [[f"FutureWarning at {__file__}"]]


@pytest.mark.parametrize("form", ["group", "name", "mesh"])
def test_other_forms_do_not_warn(form: str) -> None:
    assert run_ranks(warns, 1, form) == [[]]


# Sub-groups


@each_function
@pytest.mark.parametrize("by_name", [True, False])
@on_ranks(3)
def test_a_sub_group_is_used_by_its_members_alone(
    rank: int, world: int, function: str, by_name: bool
) -> None:
    members = [0, 2]
    group = dist.new_group(members)
    if rank in members:
        x = sample(rank, PROGRAM_SHAPE)
        expected = finished(PROGRAMS[function](stock, x, 2, group))
        assert_same(PROGRAMS[function](funcol, x, 2, group.group_name if by_name else group), expected)
        dist.destroy_process_group(group)


@on_ranks(3)
def test_a_source_counts_within_its_group(rank: int, world: int) -> None:
    members = [1, 2]
    group = dist.new_group(members)
    if rank in members:
        result = funcol.broadcast(torch.tensor([float(rank)]), 1, group)
        assert result.item() == 2.0
        dist.destroy_process_group(group)


@on_ranks(4)
def test_collectives_of_several_groups_may_be_under_way_at_once(rank: int, world: int) -> None:
    mesh = square()
    rows = funcol.all_reduce(torch.tensor(float(rank)), "sum", (mesh, 1))
    columns = funcol.all_reduce(torch.tensor(float(rank)), "sum", (mesh, 0))
    everybody = funcol.all_reduce(torch.tensor(float(rank)), "sum", world_group())
    assert everybody.item() == 6
    assert columns.item() == {0: 2, 1: 4}[rank % 2]
    assert rows.item() == {0: 1, 1: 5}[rank // 2]


# Groups that come and go


def num_ranks_of(group: Any) -> int:
    return funcol.all_gather_tensor(torch.zeros(1), 0, group).numel()


@on_ranks(3)
def test_a_name_that_is_registered_anew_means_the_new_group(rank: int, world: int) -> None:
    pair, trio = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    name = "reused"
    if rank < 2:
        c10d._register_process_group(name, pair)
        assert num_ranks_of(name) == 2
        c10d._unregister_process_group(name)
    c10d._register_process_group(name, trio)
    assert num_ranks_of(name) == 3
    c10d._unregister_process_group(name)


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_the_name_of_a_destroyed_group_is_unknown_though_its_object_lives(rank: int, world: int) -> None:
    group = dist.new_group(all_ranks())
    name = group.group_name
    assert num_ranks_of(name) == world
    dist.destroy_process_group(group)
    with pytest.raises(ValueError, match=rf"funcol::all_gather_tensor: no process group .* '{name}'"):
        num_ranks_of(name)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("form", FORMS_OF_ALL_RANKS)
@on_ranks()
def test_a_default_group_made_anew_is_used_though_the_old_object_lives(
    rank: int, world: int, form: str
) -> None:
    old = world_group()
    name = old.group_name
    assert num_ranks_of(FORMS[form]()[0]) == world
    rejoin()
    assert world_group() is not old
    assert world_group().group_name == name
    assert num_ranks_of(FORMS[form]()[0]) == world


@on_ranks(2)
def test_many_names_in_turn_mean_their_own_groups(rank: int, world: int) -> None:
    groups = [dist.new_group(all_ranks()[: 1 + index % world]) for index in range(12)]
    for _ in range(2):
        for index, group in enumerate(groups):
            size = 1 + index % world
            if rank < size:
                assert num_ranks_of(group.group_name) == size
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


@on_ranks(2)
def test_a_thread_that_has_seen_no_group_finds_them_by_name(rank: int, world: int) -> None:
    import threading

    group = dist.new_group(all_ranks())
    sizes: list[int] = []

    def gather(name: str) -> None:
        if device_type() == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        sizes.append(num_ranks_of(name))

    # One thread at a time: the order of collectives must be the same on all ranks.
    for name in (world_group().group_name, group.group_name):
        thread = threading.Thread(target=gather, args=(name,))
        thread.start()
        thread.join()
    dist.destroy_process_group(group)
    assert sizes == [world, world]
