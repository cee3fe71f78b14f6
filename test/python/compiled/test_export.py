"""``torch.export`` of tensor-parallel models under ``funcol.install()``."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from sharded import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import funcol


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.parametrize("strict", [False, True])
@on_ranks(2)
def test_exported_tensor_parallel_model_computes_what_the_model_does(
    rank: int, world: int, strict: bool
) -> None:
    torch.manual_seed(0)
    block = Block()
    x, y = torch.randn(2, 4, 8)
    expected = block(x), block(y)
    with funcol.installed():
        parallelize_module(block, mesh_of((world,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
        program = torch.export.export(block, (x,), strict=strict).module()
        torch.testing.assert_close((program(x), program(y)), expected)
        assert torch.equal(program(x), block(x))
    assert torch.equal(program(x), block(x))


@on_ranks(2)
def test_operators_on_lists_see_their_specs_after_an_export(rank: int, world: int) -> None:
    with funcol.installed():
        torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
        parts = [
            distribute_tensor(torch.full((4, 2), float(i)), mesh_of((world,)), [Shard(0)]) for i in (1, 2)
        ]
        joined = torch.cat(parts, dim=1)
        assert isinstance(joined, DTensor)
        assert joined.placements == (Shard(0),)
        assert joined.full_tensor().tolist() == [[1.0, 1.0, 2.0, 2.0]] * 4
