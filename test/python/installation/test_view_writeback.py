"""With funcol under DTensor, what programs write into views and at indices is not lost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from sharded import mesh_of, placed
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from twins import as_on_plain_tensors, numbers, replicated

import funcol
from funcol import _compat
from funcol.installation import view_writeback

ON_DEVICES = True

aten = torch.ops.aten
Write = Callable[[Tensor], Any]


def rows(x: Tensor, *numbers: int) -> Tensor:
    return replicated(torch.tensor(numbers), x)


def ones(x: Tensor, *shape: int) -> Tensor:
    return replicated(torch.ones(shape, dtype=torch.float64), x)


def a_row(x: Tensor) -> Tensor:
    x[0] = 7
    return x


def the_last_row(x: Tensor) -> Tensor:
    x[-1] = 7
    return x


def every_other_row(x: Tensor) -> Tensor:
    x[::2] = 7
    return x


def rows_of_another(x: Tensor) -> Tensor:
    x[1:3] = ones(x, 2, 3)
    return x


def an_element(x: Tensor) -> Tensor:
    x[2, 1] = 7
    return x


def part_of_a_column(x: Tensor) -> Tensor:
    x[1:4, 0] = 7
    return x


def at_a_mask(x: Tensor) -> Tensor:
    x[x > 0.5] = 0
    return x


def at_indices(x: Tensor) -> Tensor:
    x[rows(x, 3, 0)] = 7
    return x


def copied(x: Tensor) -> Tensor:
    x[0].copy_(x[3])
    return x


def filled(x: Tensor) -> Tensor:
    x.select(0, 3).fill_(3)
    return x


def scaled(x: Tensor) -> Tensor:
    x[1:3].mul_(2)
    return x


def diagonal(x: Tensor) -> Tensor:
    x.diagonal().fill_(3)
    return x


def row_of_the_transposed(x: Tensor) -> Tensor:
    x.t()[:, 2].mul_(3)
    return x


def view_of_a_view(x: Tensor) -> Tensor:
    x[1:4][2][1:].zero_()
    return x


def two_views_one_after_the_other(x: Tensor) -> Tensor:
    first, second = x[0:3], x[1:4]
    first.mul_(2)
    second.add_(1)
    first.add_(3)
    return x


def the_view_itself(x: Tensor) -> Tensor:
    view = x[1:4]
    view.mul_(2)
    return view * view


def put_at_indices(x: Tensor) -> Tensor:
    return x.index_put_((rows(x, 0, 2),), ones(x, 2, 3))


def accumulated_at_indices(x: Tensor) -> Tensor:
    return x.index_put_((rows(x, 0, 2, 0),), ones(x, 3, 3), accumulate=True)


def rows_filled(x: Tensor) -> Tensor:
    return x.index_fill_(0, rows(x, 0, 2), 3.0)


def rows_added(x: Tensor) -> Tensor:
    return x.index_add_(0, rows(x, 0, 2), ones(x, 2, 3), alpha=2)


def rows_copied(x: Tensor) -> Tensor:
    return x.index_copy_(0, rows(x, 3, 2), ones(x, 2, 3))


def scattered(x: Tensor) -> Tensor:
    return x.scatter_(0, rows(x, 0, 2, 1).view(1, 3), ones(x, 2, 3))


def scattered_number(x: Tensor) -> Tensor:
    return x.scatter_(0, rows(x, 0, 3, 1).view(1, 3), 5.0)


def scatter_added(x: Tensor) -> Tensor:
    return x.scatter_add_(0, rows(x, 0, 3, 0).view(1, 3), ones(x, 2, 3))


WRITES: dict[str, Write] = {
    write.__name__: write
    for write in (
        a_row, the_last_row, every_other_row, rows_of_another, an_element, part_of_a_column, at_a_mask,
        at_indices, copied, filled, scaled, diagonal, row_of_the_transposed, view_of_a_view,
        two_views_one_after_the_other, the_view_itself, put_at_indices, accumulated_at_indices, rows_filled,
        rows_added, rows_copied, scattered, scattered_number, scatter_added,
    )
}  # fmt: skip
# PyTorch's gradients of these mix DTensors with plain tensors, and raise.
WITHOUT_GRADIENT = {"put_at_indices"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", ["S0", "S1"])
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("name", WRITES)
@as_on_plain_tensors(lambda size: [numbers(size, 3)])
def test_a_write_reaches_a_tensor_that_is_cut(x: Tensor, *, name: str) -> Any:
    return WRITES[name](x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", ["S0", "S1"])
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("name", sorted(WRITES.keys() - WITHOUT_GRADIENT))
@as_on_plain_tensors(lambda size: [numbers(size, 3)], backward=True)
def test_a_write_to_a_tensor_that_is_cut_has_its_gradient(x: Tensor, *, name: str) -> Any:
    return WRITES[name](x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", ["S0 S1", "S0 S0", "R S0", "S1 R"])
@pytest.mark.parametrize(
    "name", ["a_row", "part_of_a_column", "view_of_a_view", "put_at_indices", "diagonal"]
)
@as_on_plain_tensors(lambda: [numbers(5, 3)])
def test_a_write_reaches_a_tensor_that_two_axes_cut(x: Tensor, *, name: str) -> Any:
    return WRITES[name](x)


@pytest.mark.parametrize("words", ["Psum", "Pavg", "Pmax"])
@pytest.mark.parametrize("name", ["a_row", "part_of_a_column", "at_a_mask", "put_at_indices", "rows_filled"])
@as_on_plain_tensors(lambda: [numbers(5, 3)])
def test_a_write_reaches_a_tensor_that_is_pending(x: Tensor, *, name: str) -> Any:
    return WRITES[name](x)


def an_element_of_the_flat(x: Tensor) -> Tensor:
    x.view(-1)[3] = 2
    return x


def an_element_of_the_flattened(x: Tensor) -> Tensor:
    x.flatten()[3] = 2
    return x


def part_of_the_flat(x: Tensor) -> Tensor:
    x.view(-1)[2:6].mul_(3)
    return x


def all_of_the_flat(x: Tensor) -> Tensor:
    x.view(-1).fill_(2)
    return x


def a_block(x: Tensor) -> Tensor:
    x.view(2, 2, 4)[0].zero_()
    return x


def half_of_the_columns(x: Tensor) -> Tensor:
    x.unflatten(1, (2, 2))[:, 0].add_(1)
    return x


RESHAPED: dict[str, Write] = {
    write.__name__: write
    for write in (
        an_element_of_the_flat, an_element_of_the_flattened, part_of_the_flat, all_of_the_flat, a_block,
        half_of_the_columns,
    )
}  # fmt: skip


@pytest.mark.parametrize("words", ["S0", "S1", "Psum"])
@pytest.mark.parametrize("name", RESHAPED)
@as_on_plain_tensors(lambda: [numbers(4, 4)])
def test_a_write_through_another_shape_reaches_the_tensor(x: Tensor, *, name: str) -> Any:
    return RESHAPED[name](x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", ["S1 S0", "S1 S1", "R S1", "Psum S1"])
@pytest.mark.parametrize("name", RESHAPED)
@as_on_plain_tensors(lambda: [numbers(4, 4)])
def test_a_write_through_another_shape_reaches_a_tensor_that_two_axes_cut(x: Tensor, *, name: str) -> Any:
    return RESHAPED[name](x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("second", [False, True], ids=["one axis", "two axes"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", RESHAPED)
@as_on_plain_tensors(lambda: [numbers(4, 4)], words="R R")
def test_a_write_through_another_shape_reaches_strided_shards(
    x: Tensor, *, name: str, dim: int, second: bool
) -> Any:
    if not isinstance(x, DTensor):
        return RESHAPED[name](x.clone())
    other = Shard(dim) if second else Replicate()
    return RESHAPED[name](x.redistribute(placements=[_StridedShard(dim, split_factor=2), other]))


def unbound(x: Tensor) -> Tensor:
    for number, row in enumerate(x.unbind()):
        row.add_(number)
    return x


def chunked(x: Tensor) -> Tensor:
    first, second = x.chunk(2)
    second.zero_()
    first.mul_(2)
    return x


def split(x: Tensor) -> Tensor:
    x.split(2)[1].zero_()
    return x


SEVERAL: dict[str, Write] = {write.__name__: write for write in (unbound, chunked, split)}


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("name", SEVERAL)
@as_on_plain_tensors(lambda size: [numbers(size, 3)], words="S0")
def test_a_write_to_one_of_several_views_reaches_the_tensor(x: Tensor, *, name: str) -> Any:
    return SEVERAL[name](x)


# Compiled regions

# In releases whose DTensor does not look into the indices of index_put_, PyTorch cannot trace it.
TRACES_INDICES = any(
    aten.index_put_.default in getattr(DTensor._op_dispatcher.sharding_propagator, table, ())
    for table in _compat.TABLES_OF_SCHEMA_INFO
)
AT_INDICES = {"at_a_mask", "at_indices", "put_at_indices", "accumulated_at_indices"}
TRACED = [name for name in WRITES if TRACES_INDICES or name not in AT_INDICES]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TRACED)
@as_on_plain_tensors(lambda: [numbers(5, 3)], words="S0", compiles={})
def test_a_compiled_write_reaches_a_tensor_that_is_cut(x: Tensor, *, name: str) -> Any:
    return WRITES[name](x)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", ["S1", "Psum", "Pavg", "Pmax"])
@pytest.mark.parametrize("name", ["a_row", "part_of_a_column", "rows_filled"])
@as_on_plain_tensors(lambda: [numbers(4, 3)], compiles={})
def test_a_compiled_write_reaches_a_tensor_however_it_is_placed(x: Tensor, *, name: str) -> Any:
    return WRITES[name](x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in TRACED
        if name in ("a_row", "at_a_mask", "rows_of_another", "two_views_one_after_the_other")
    ],
)
@as_on_plain_tensors(lambda: [numbers(5, 3)], words="S0", backward=True, compiles={})
def test_a_compiled_write_to_a_tensor_that_is_cut_has_its_gradient(x: Tensor, *, name: str) -> Any:
    """Writes to a product: PyTorch has no gradients of compiled regions that write to their own inputs."""
    return WRITES[name](x * 1)


def changes_between_views(x: Tensor) -> Tensor:
    row = x[0]
    x.mul_(2)
    row.add_(1)
    return x


@on_ranks(2)
def test_a_view_with_old_values_is_not_added_to_in_a_compiled_region(rank: int, world: int) -> None:
    x = placed(numbers(4, 3), "S0", mesh_of((world,)))
    torch._dynamo.reset()
    with (
        funcol.installed(),
        pytest.raises(Exception, match=r"aten\.add_\.Tensor writes to a view .* Take the"),
    ):
        torch.compile(changes_between_views, backend="aot_eager")(x)


@on_ranks(2)
def test_what_is_written_to_a_gathered_row_is_brought_back_without_communication(
    rank: int, world: int
) -> None:
    x = placed(numbers(4, 3), "S0", mesh_of((world,)))
    with funcol.installed():
        row = x[0]
        with CommDebugMode() as during:
            row.fill_(7)
    assert during.get_total_counts() == 0


@on_ranks(2)
def test_a_view_with_old_values_is_not_added_to(rank: int, world: int) -> None:
    x = placed(numbers(4, 3), "S0", mesh_of((world,)))
    with funcol.installed():
        row = x[0]
        x.mul_(2)
        with pytest.raises(RuntimeError, match=r"aten\.add_\.Tensor writes to a view .* Take the view again"):
            row.add_(1)
        row.fill_(5)  # whatever the row held
        assert x.full_tensor()[0].tolist() == [5.0] * 3
        torch.testing.assert_close(x.full_tensor()[1:], 2 * numbers(4, 3)[1:])


@on_ranks(2)
def test_a_copy_is_forgotten_with_the_last_view_of_it(rank: int, world: int) -> None:
    x = placed(numbers(4, 3), "S0", mesh_of((world,)))
    with funcol.installed():
        gc.collect()
        before = set(view_writeback.open_copies)
        view = x[0][1:]
        assert len(view_writeback.open_copies - before) == 1
        del view
        gc.collect()  # a decision made for the first time may keep its caller's frame
        assert not view_writeback.open_copies - before


@on_ranks(2)
def test_a_tensor_that_is_written_to_stays_where_it_is(rank: int, world: int) -> None:
    x = placed(numbers(4, 3), "S0", mesh_of((world,)))
    with funcol.installed():
        result = x.index_fill_(0, rows(x, 0, 3), 2.0)
    assert result is x
    assert isinstance(x, DTensor)
    assert str(x.placements) == "(Shard(dim=0),)"
    assert x.to_local().shape == (2, 3)


@on_ranks(2)
def test_running_statistics_that_would_have_to_move_are_refused(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    x, mean, variance = (placed(one, "Psum", mesh) for one in (numbers(4, 3, 2), numbers(3), numbers(3)))
    with funcol.installed(), pytest.raises(RuntimeError, match=r"batch_norm: no way to run it leaves"):
        torch.nn.functional.batch_norm(x, mean, variance, training=True)
