"""With funcol under DTensor, normalizations and other operators of batches run where the batch is cut, on
ranks without elements, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import layouts, mesh_of
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from twins import check_twin, numbers, placed, replicated

import funcol

aten = torch.ops.aten


def gradients_of_a_frozen_input(training: bool, x: Tensor) -> Any:
    """Returns the gradients of weight and bias of a batch norm of ``x``, cut by two kinds of shards."""
    mean, scale = weight(x, 6), weight(x, 6)
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[_StridedShard(0, split_factor=2), Shard(0)])
    return aten.native_batch_norm_backward(
        x * x, x, scale, mean, scale, mean, scale, training, 1e-5, [False, True, True]
    )[1:]


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_of_a_frozen_input_has_gradients_where_strided_shards_cut_it(training: bool) -> None:
    check_twin(
        functools.partial(gradients_of_a_frozen_input, training), [numbers(8, 6, 4)], "R R", mesh=(2, 2)
    )


def evaluated(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    result: Tensor = aten._native_batch_norm_legit(x, None, None, mean, variance, False, 0.1, 1e-5)[0]
    return result


@pytest.mark.parametrize("words", [("S0", "S0", "R"), ("S1", "R", "S0"), ("R", "S0", "Psum")], ids=",".join)
@pytest.mark.parametrize("norm", [evaluated, functional.batch_norm])
def test_statistics_that_a_batch_norm_reads_may_be_anywhere(
    norm: Callable[..., Tensor], words: tuple[str, ...]
) -> None:
    check_twin(norm, [numbers(4, 6, 3), numbers(6), numbers(6, seed=1) + 1], *words)


# Operators on a batch, most of whose ranks have no element of it


def weight(x: Tensor, *shape: int) -> Any:
    return replicated(torch.linspace(0.5, 1.5, torch.Size(shape).numel(), dtype=torch.float64).view(shape), x)


def rows_of(x: Tensor, *numbers: int) -> Any:
    return replicated(torch.tensor(numbers), x)


OF_A_BATCH: dict[str, Callable[[Tensor], Any]] = {
    "layer norm": lambda x: functional.layer_norm(x, (4,), weight(x, 4)),
    "group norm": lambda x: functional.group_norm(x, 3, weight(x, 6)),
    "batch norm, evaluated": lambda x: functional.batch_norm(x, weight(x, 6), weight(x, 6)),
    "convolution": lambda x: functional.conv1d(x, weight(x, 2, 6, 2)),
    "max pooling": lambda x: functional.max_pool2d(x[:, :, None, :], (1, 2)),
    "average pooling": lambda x: functional.avg_pool2d(x[:, :, None, :], (1, 2)),
    "upsampling": lambda x: functional.interpolate(x, scale_factor=2.0, mode="linear"),
    "cross entropy": lambda x: functional.cross_entropy(
        x.reshape(-1, 24), replicated(torch.arange(x.shape[0]), x), reduction="sum"
    ),
    "index": lambda x: x[:, rows_of(x, 1, 3)],
    "index select": lambda x: x.index_select(1, rows_of(x, 1, 3)),
    "index fill": lambda x: x.index_fill(1, rows_of(x, 1, 3), 2.0),
    "index add": lambda x: x.index_add(1, rows_of(x, 1, 3), weight(x, x.shape[0], 2, 4)),
    "index copy": lambda x: x.index_copy(1, rows_of(x, 1, 3), weight(x, x.shape[0], 2, 4)),
    "scatter add": lambda x: x.scatter_add(1, (x[:, :2] * 0).long().detach(), x[:, :2]),
}


def of_a_batch(name: str, x: Tensor) -> Any:
    return OF_A_BATCH[name](x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", OF_A_BATCH)
def test_an_operator_of_a_batch_has_its_gradient_on_ranks_without_elements(name: str, size: int) -> None:
    check_twin(functools.partial(of_a_batch, name), [numbers(size, 6, 4)], "S0", mesh=(4,), backward=True)


def keeps_the_batch_cut(rank: int, world: int, name: str, size: int) -> Any:
    x = placed(numbers(size, 6, 4), layouts("S0")[0], mesh_of((world,))).requires_grad_()
    with funcol.installed():
        with CommDebugMode() as during:
            OF_A_BATCH[name](x).sum().backward()
        assert x.grad is not None
        assert x.grad.placements == (Shard(0),)
    return during.get_total_counts()


@pytest.mark.parametrize("size", [5, 6, 9])
@pytest.mark.parametrize("name", ["layer norm", "group norm", "convolution"])
def test_an_operator_of_a_batch_sends_nothing_where_ranks_have_no_element(name: str, size: int) -> None:
    assert run_ranks(keeps_the_batch_cut, 4, name, size) == [0] * 4
