"""PyTorch's ``local_map`` over uneven shards under ``funcol.install()``."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from sharded import mesh_of
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import local_map

import funcol


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 4, 5, 7])
@on_ranks()
def test_result_has_the_shape_of_the_input(rank: int, world: int, size: int) -> None:
    mesh = mesh_of((world,))
    whole = torch.arange(size * 3.0).reshape(size, 3)
    with funcol.installed():
        x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()

        def rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x * 2, x.sum(dim=1), x.t()

        out = local_map(rows, out_placements=([Shard(0)], [Shard(0)], [Shard(1)]))(x)
        expected = (whole * 2, whole.sum(dim=1), whole.t())
        for one, other in zip(out, expected, strict=True):
            assert one.shape == other.shape
            assert torch.equal(one.full_tensor(), other)
        out[0].sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full_like(whole, 2))


@on_ranks(2)
def test_result_that_no_input_is_as_long_as(rank: int, world: int) -> None:
    with funcol.installed():
        # The shard of rank 1 is as long as its result, that of rank 0 is not.
        x = distribute_tensor(torch.arange(3.0), mesh_of((2,)), [Shard(0)])
        total = local_map(lambda x: x.sum().reshape(1), out_placements=[Shard(0)])(x)
        assert total.full_tensor().tolist() == [1.0, 2.0]


@on_ranks(4)
def test_two_mesh_axes(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    whole = torch.arange(35.0).reshape(5, 7)
    with funcol.installed():
        for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)]):
            x = distribute_tensor(whole, mesh, placements)
            out = local_map(
                lambda x: x + 1,
                out_placements=placements,
                in_placements=(placements,),
                redistribute_inputs=True,
            )(x)
            assert out.shape == whole.shape
            assert torch.equal(out.full_tensor(), whole + 1)


@on_ranks(2)
def test_even_shards_communicate_nothing(rank: int, world: int) -> None:
    x = distribute_tensor(torch.ones(4, 3), mesh_of((2,)), [Shard(0)])
    with funcol.installed(), CommDebugMode() as mode:
        out = local_map(lambda x: x + 1, out_placements=[Shard(0)])(x)
    assert isinstance(out, DTensor)
    assert mode.get_total_counts() == 0
