"""Uneven gathers and scatters, and collectives with a root: what all inputs give when put together here."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from differential import DTYPES, LAYOUTS, LAYOUTS_OF_DTYPES, REDUCTIONS, WORLDS, sample, world_group
from ranks import made_once, run_ranks
from test_beyond_stock import assert_plain, bits, small_sample
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import funcol

each_world = pytest.mark.parametrize("world", WORLDS)

# What one rank gets of each reduction, given the inputs of all.
REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def reduced(inputs: list[Tensor], reduce_op: str) -> Tensor:
    total = reduce(REDUCE[reduce_op], inputs)
    return total / len(inputs) if reduce_op == "avg" else total


def summands(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A :func:`sample` that every order of additions and multiplications reduces to the same bits."""
    x = sample(rank, shape, dtype)
    if x.is_complex():
        return torch.view_as_complex(small_numbers(torch.view_as_real(x)))
    return small_numbers(x) if x.is_floating_point() else x


def small_numbers(x: Tensor) -> Tensor:
    """Without zeros, whose sign some reductions leave open."""
    x = x.round().clamp(-3, 3)
    return torch.where(x == 0, torch.ones_like(x), x)


# Sizes along the dim of interest: SIZES[name](number of ranks).
SIZES: dict[str, Callable[[int], list[int]]] = {
    "equal": lambda world: [2] * world,
    "odd": lambda world: [3, 1, 5][:world],
    "with 0": lambda world: [2, 0, 3][:world],
    "first has all": lambda world: [5] + [0] * (world - 1),
    "last has all": lambda world: [0] * (world - 1) + [4],
    "none has any": lambda world: [0] * world,
}
each_sizes = pytest.mark.parametrize("sizes", SIZES)


class Problem(NamedTuple):
    """A collective along a dim of 3-dim tensors; the whole has shape ``others`` but along ``dim``."""

    sizes: list[int]
    dim: int = 1
    root: int = 0
    others: tuple[int, int, int] = (2, 3, 4)

    def shape(self, size: int) -> tuple[int, ...]:
        shape = list(self.others)
        shape[self.dim] = size
        return tuple(shape)

    def whole(self, rank: int) -> tuple[int, ...]:
        return self.shape(sum(self.sizes))

    def shard(self, rank: int) -> tuple[int, ...]:
        return self.shape(self.sizes[rank])


def gathered_on_root(inputs: list[Tensor], rank: int, problem: Problem) -> Tensor:
    whole = torch.cat(inputs, problem.dim)
    return whole if rank == problem.root else whole.narrow(problem.dim, 0, 0)


def reduced_on_root(inputs: list[Tensor], rank: int, problem: Problem) -> Tensor:
    return reduced(inputs, "sum") if rank == problem.root else torch.zeros_like(inputs[rank])


class Collective(NamedTuple):
    shape: Callable[[Problem, int], tuple[int, ...]]
    """Shape of a rank's input."""
    call: Callable[[Tensor, Problem, Any, list[int] | None], Tensor]
    """The function, given its input, the group and split_sizes."""
    result: Callable[[list[Tensor], int, Problem], Tensor]
    """What a rank gets, given the inputs of all."""


COLLECTIVES = {
    "all_gather_tensor": Collective(
        Problem.shard,
        lambda x, problem, group, sizes: funcol.all_gather_tensor(x, problem.dim, group, split_sizes=sizes),
        lambda inputs, rank, problem: torch.cat(inputs, problem.dim),
    ),
    "reduce_scatter_tensor": Collective(
        Problem.whole,
        lambda x, problem, group, sizes: funcol.reduce_scatter_tensor(
            x, "sum", problem.dim, group, split_sizes=sizes
        ),
        lambda inputs, rank, problem: reduced(inputs, "sum").split(problem.sizes, problem.dim)[rank],
    ),
    "scatter": Collective(
        Problem.whole,
        lambda x, problem, group, sizes: funcol.scatter(
            x, problem.root, problem.dim, group, split_sizes=sizes
        ),
        lambda inputs, rank, problem: inputs[problem.root].split(problem.sizes, problem.dim)[rank],
    ),
    "gather": Collective(
        Problem.shard,
        lambda x, problem, group, sizes: funcol.gather(
            x, problem.root, problem.dim, group, split_sizes=sizes
        ),
        gathered_on_root,
    ),
    "reduce": Collective(
        Problem.whole,
        lambda x, problem, group, sizes: funcol.reduce(x, "sum", problem.root, group),
        reduced_on_root,
    ),
}
UNEVEN = [name for name in COLLECTIVES if name != "reduce"]
ROOTED = ["scatter", "gather", "reduce"]
MOVERS = ["all_gather_tensor", "scatter", "gather"]
each_collective = pytest.mark.parametrize("name", COLLECTIVES)
each_uneven = pytest.mark.parametrize("name", UNEVEN)


def run_and_compare(
    rank: int,
    name: str,
    problem: Problem,
    inputs: list[Tensor],
    group: Any = None,
    given_sizes: bool = True,
    own: Tensor | None = None,
) -> None:
    """The call on this rank's input, or on ``own`` of the same value: its result, and what else it does."""
    collective = COLLECTIVES[name]
    x = inputs[rank] if own is None else own
    version = x._version
    result = collective.call(x, problem, group or world_group(), list(problem.sizes) if given_sizes else None)
    assert funcol.is_pending(result)
    assert_plain(result, collective.result(inputs, rank, problem).resolve_conj().resolve_neg().contiguous())
    assert x._version == version
    assert bits(x) == bits(inputs[rank])


def inputs_of(name: str, problem: Problem, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shape = COLLECTIVES[name].shape
    known = dtype in DTYPES
    make = summands if known else small_sample
    return [make(rank, shape(problem, rank), dtype) for rank in range(len(problem.sizes))]


# Sizes, dims, roots


def moves_parts(
    rank: int, world: int, name: str, sizes: str, options: dict[str, Any], dtype: torch.dtype = torch.float32
) -> None:
    problem = Problem(SIZES[sizes](world), **options)
    run_and_compare(rank, name, problem, inputs_of(name, problem, dtype))


@each_world
@each_uneven
@each_sizes
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_parts_of_each_size_are_gathered_and_scattered_along_each_dim(
    world: int, name: str, sizes: str, dim: int
) -> None:
    run_ranks(moves_parts, world, name, sizes, {"dim": dim})


@pytest.mark.parametrize(("world", "root"), [(world, root) for world in WORLDS for root in range(world)])
@pytest.mark.parametrize("name", ROOTED)
@pytest.mark.parametrize("sizes", ["odd", "with 0", "last has all"])
def test_each_rank_can_be_the_root(world: int, root: int, name: str, sizes: str) -> None:
    run_ranks(moves_parts, world, name, sizes, {"root": root})


@each_world
@each_collective
@pytest.mark.parametrize("others", [(0, 3, 4), (2, 3, 0), (1, 3, 5), (1, 3, 1)], ids=str)
def test_the_other_dims_can_have_any_size(world: int, name: str, others: tuple[int, int, int]) -> None:
    run_ranks(moves_parts, world, name, "with 0", {"others": others})


def moves_rows(rank: int, world: int, name: str) -> None:
    shape = COLLECTIVES[name].shape
    problem = Problem([3, 0, 2][:world], dim=0)
    inputs = [sample(peer, shape(problem, peer)[:1]) for peer in range(world)]
    collective = COLLECTIVES[name]
    result = collective.call(inputs[rank], problem, world_group(), problem.sizes)
    assert_plain(result, collective.result(inputs, rank, problem))


@pytest.mark.parametrize("world", [1, 2])
@each_collective
def test_a_tensor_can_have_one_dim(world: int, name: str) -> None:
    run_ranks(moves_rows, world, name)


def moves_equal_parts(rank: int, world: int, name: str, dim: int) -> None:
    problem = Problem([2] * world, dim=dim)
    run_and_compare(rank, name, problem, inputs_of(name, problem), given_sizes=False)


@each_world
@each_collective
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
def test_parts_are_equal_without_split_sizes(world: int, name: str, dim: int) -> None:
    run_ranks(moves_equal_parts, world, name, dim)


def takes_a_tuple(rank: int, world: int, name: str) -> None:
    problem = Problem([3, 1])
    inputs = inputs_of(name, problem)
    collective = COLLECTIVES[name]
    sizes: Any = (3, 1)
    result = collective.call(inputs[rank], problem, world_group(), sizes)
    assert_plain(result, collective.result(inputs, rank, problem).contiguous())


@each_uneven
def test_split_sizes_can_be_a_tuple(name: str) -> None:
    run_ranks(takes_a_tuple, 2, name)


# Dtypes


@each_world
@each_collective
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", ["odd", "with 0"])
def test_each_dtype_is_gathered_and_scattered(world: int, name: str, dtype: torch.dtype, sizes: str) -> None:
    run_ranks(moves_parts, world, name, sizes, {"root": world - 1}, dtype)


@each_world
@pytest.mark.parametrize("name", MOVERS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int16, torch.complex128], ids=str)
@pytest.mark.parametrize("sizes", ["odd", "with 0", "none has any"])
def test_dtypes_that_gloo_does_not_know_are_moved(
    world: int, name: str, dtype: torch.dtype, sizes: str
) -> None:
    run_ranks(moves_parts, world, name, sizes, {"root": world - 1}, dtype)


# Inputs


def takes_layout(rank: int, world: int, name: str, layout: str, dtype: torch.dtype) -> None:
    problem = Problem([1, 3], root=1)
    shape = COLLECTIVES[name].shape
    inputs = [LAYOUTS[layout](peer, shape(problem, peer), dtype) for peer in range(world)]
    run_and_compare(rank, name, problem, inputs)


@each_collective
@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS_OF_DTYPES, ids=str)
def test_an_input_can_have_any_layout(name: str, layout: str, dtype: torch.dtype) -> None:
    run_ranks(takes_layout, 2, name, layout, dtype)  # a sum of two has the same bits in any order


def takes_pending(rank: int, world: int, name: str) -> None:
    problem = Problem([1, 3, 2][:world], dim=2, root=world - 1)
    inputs = inputs_of(name, problem)
    pending = funcol.permute_tensor(inputs[rank], list(range(world)), world_group())
    assert funcol.is_pending(pending)
    result = COLLECTIVES[name].call(pending, problem, world_group(), problem.sizes)
    assert_plain(result, COLLECTIVES[name].result(inputs, rank, problem).contiguous())
    assert bits(pending) == bits(inputs[rank])


@each_world
@each_collective
def test_an_input_can_be_pending(world: int, name: str) -> None:
    run_ranks(takes_pending, world, name)


def passes_results_on(rank: int, world: int) -> None:
    sizes = [1, 3, 2][:world]
    x = sample(rank, (2, sum(sizes)))
    part = funcol.scatter(x, world - 1, 1, world_group(), split_sizes=sizes)
    whole = funcol.all_gather_tensor(part, 1, world_group(), split_sizes=sizes)
    part = funcol.reduce_scatter_tensor(whole, "max", 1, world_group(), split_sizes=sizes)
    whole = funcol.gather(part, 0, 1, world_group(), split_sizes=sizes)
    assert funcol.is_pending(whole)
    assert_plain(whole, sample(world - 1, x.shape) if rank == 0 else x.new_empty(2, 0))


@each_world
def test_a_result_can_be_passed_on_while_it_is_pending(world: int) -> None:
    run_ranks(passes_results_on, world)


def takes_a_view_of_pending(rank: int, world: int, name: str) -> None:
    problem = Problem([1, 3, 2][:world], dim=1)
    inputs = inputs_of(name, problem)
    pending = funcol.permute_tensor(inputs[rank].mT.contiguous(), list(range(world)), world_group()).mT
    assert funcol.is_pending(pending)
    result = COLLECTIVES[name].call(pending, problem, world_group(), problem.sizes)
    assert_plain(result, COLLECTIVES[name].result(inputs, rank, problem).contiguous())


@each_world
@each_collective
def test_an_input_can_be_a_view_of_a_pending_tensor(world: int, name: str) -> None:
    run_ranks(takes_a_view_of_pending, world, name)


def scatters_from_the_source_alone(rank: int, world: int, dtype: torch.dtype, sizes: str) -> None:
    problem = Problem(SIZES[sizes](world), root=world - 1)
    shape = problem.whole(rank)
    inputs = [small_sample(problem.root, shape, dtype)] * world
    own = inputs[0] if rank == problem.root else torch.empty((), dtype=dtype).expand(shape)
    result = funcol.scatter(own, problem.root, problem.dim, world_group(), split_sizes=problem.sizes)
    assert_plain(result, COLLECTIVES["scatter"].result(inputs, rank, problem).contiguous())


@each_world
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.complex64], ids=str)
@pytest.mark.parametrize("sizes", ["odd", "with 0"])
def test_scatter_takes_an_expanded_scalar_on_ranks_that_send_nothing(
    world: int, dtype: torch.dtype, sizes: str
) -> None:
    run_ranks(scatters_from_the_source_alone, world, dtype, sizes)


# Reductions


def reduces(
    rank: int, world: int, dst: int, dtype: torch.dtype, reduce_op: str, shape: tuple[int, ...]
) -> None:
    inputs = [summands(peer, shape, dtype) for peer in range(world)]
    before = bits(inputs[rank])
    result = funcol.reduce(inputs[rank], reduce_op, dst, world_group())
    assert funcol.is_pending(result)
    expected = reduced(inputs, reduce_op) if rank == dst else torch.zeros(shape, dtype=dtype)
    assert_close(result, expected, reduce_op)
    assert bits(inputs[rank]) == before


def assert_close(actual: Tensor, expected: Tensor, reduce_op: str) -> None:
    """Same bits, but for averages: backends may divide before they add."""
    if reduce_op != "avg":
        assert_plain(actual, expected)
        return
    assert actual.is_contiguous()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("world", "dst"), [(1, 0), (2, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize(("dtype", "reduce_op"), REDUCTIONS, ids=str)
def test_reduce_gives_its_destination_each_reduction(
    world: int, dst: int, dtype: torch.dtype, reduce_op: str
) -> None:
    run_ranks(reduces, world, dst, dtype, reduce_op, (3, 5))


@each_world
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 0, 3), (2, 3, 5)], ids=str)
def test_reduce_takes_each_shape(world: int, shape: tuple[int, ...]) -> None:
    run_ranks(reduces, world, world - 1, torch.float32, "sum", shape)


def scatters_a_reduction(rank: int, world: int, dtype: torch.dtype, reduce_op: str) -> None:
    sizes = [3, 0, 2][:world]
    inputs = [summands(peer, (2, sum(sizes)), dtype) for peer in range(world)]
    result = funcol.reduce_scatter_tensor(inputs[rank], reduce_op, 1, world_group(), split_sizes=sizes)
    assert_close(result, reduced(inputs, reduce_op).split(sizes, 1)[rank].contiguous(), reduce_op)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("dtype", "reduce_op"), REDUCTIONS, ids=str)
def test_reduce_scatter_gives_uneven_parts_of_each_reduction(
    world: int, dtype: torch.dtype, reduce_op: str
) -> None:
    run_ranks(scatters_a_reduction, world, dtype, reduce_op)


REDUCE_OPS = {
    "name in capitals": lambda: "MAX",
    "enum": lambda: dist.ReduceOp.MAX,
    "object": lambda: dist.ReduceOp(dist.ReduceOp.MAX),
}


def takes_reduce_op(rank: int, world: int, name: str, form: str) -> None:
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


@pytest.mark.parametrize("name", ["reduce", "reduce_scatter_tensor"])
@pytest.mark.parametrize("form", REDUCE_OPS)
def test_a_reduce_op_can_be_an_object(name: str, form: str) -> None:
    run_ranks(takes_reduce_op, 2, name, form)


# Groups

GROUPS: dict[str, Callable[[], Any]] = {
    "name": lambda: world_group().group_name,
    "mesh": lambda: init_device_mesh("cpu", (dist.get_world_size(),)),
    "mesh and dim": lambda: (init_device_mesh("cpu", (dist.get_world_size(),)), 0),
    "ranks": lambda: list(range(dist.get_world_size())),
    "lists of ranks": lambda: [list(range(dist.get_world_size()))],
}


def takes_group(rank: int, world: int, name: str, form: str) -> None:
    problem = Problem([1, 3, 2][:world], root=world - 1)
    run_and_compare(rank, name, problem, inputs_of(name, problem), GROUPS[form]())


@pytest.mark.parametrize("world", [1, 2])
@each_collective
@pytest.mark.parametrize("form", GROUPS)
def test_a_group_can_have_any_form(world: int, name: str, form: str) -> None:
    run_ranks(takes_group, world, name, form)


@made_once
def sub_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group([1, 2])
    return group


def counts_ranks_within_the_group(rank: int, world: int, name: str, root: int) -> None:
    group = sub_group()
    if rank == 0:
        return
    problem = Problem([1, 3], root=root)
    run_and_compare(rank - 1, name, problem, inputs_of(name, problem), group)


@each_collective
@pytest.mark.parametrize("root", [0, 1])
def test_roots_and_sizes_are_those_of_ranks_within_the_group(name: str, root: int) -> None:
    run_ranks(counts_ranks_within_the_group, 3, name, root)


# Large sizes


def passes_large_splits(rank: int, world: int) -> None:
    rows = 2**31 + 8
    x = torch.empty(rows if rank == 0 else 0, 0)
    splits = ([0, 0], [0, rows]) if rank == 0 else ([rows, 0], [0, 0])
    result = funcol.all_to_all_single(x, *splits, world_group())
    assert result.shape == (0 if rank == 0 else rows, 0)


def test_all_to_all_counts_more_rows_than_fit_in_32_bits() -> None:
    run_ranks(passes_large_splits, 2, timeout=20)


def passes_large_parts(rank: int, world: int, name: str) -> None:
    problem = Problem([1, 2**31 + 8], dim=0, others=(1, 0, 1))
    inputs = [torch.empty(COLLECTIVES[name].shape(problem, peer)) for peer in range(world)]
    result = COLLECTIVES[name].call(inputs[rank], problem, world_group(), problem.sizes)
    assert result.shape == COLLECTIVES[name].result(inputs, rank, problem).shape


@each_collective
def test_parts_can_have_more_rows_than_fit_in_32_bits(name: str) -> None:
    run_ranks(passes_large_parts, 2, name, timeout=20)
