"""Hooks see what passes by and change nothing: neither placements nor values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks, run_ranks
from sharded import Layout, layouts, mesh_of, placed, whole_of
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import funcol


class Passing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("layout", layouts("R", "S0", "S1", "Psum", "Pavg", "Pmax", "Pmin"), ids=str)
@on_ranks(2)
def test_a_hook_keeps_placements(rank: int, world: int, layout: Layout) -> None:
    mesh = mesh_of((world,))
    whole = whole_of((4, 6), torch.float64)
    module = Passing()
    module.register_full_backward_hook(lambda *_: None)
    module.register_full_backward_pre_hook(lambda *_: None)
    with funcol.installed():
        x = placed(whole, layout, mesh).requires_grad_()
        result: Any = module(x)
        assert result.placements == x.placements
        assert torch.equal(result.full_tensor(), whole)


def keeps_lookups(rank: int, world: int, mesh_shape: tuple[int, ...], backward: bool) -> None:
    mesh = mesh_of(mesh_shape)
    rest = [Replicate()] * (mesh.ndim - 1)
    weight = torch.arange(24.0, dtype=torch.float64).view(8, 3)
    indices = torch.tensor([[1, 7], [3, 4]])
    plain, hooked = nn.Embedding(8, 3, dtype=torch.float64), nn.Embedding(8, 3, dtype=torch.float64)
    hooked.register_full_backward_hook(lambda *_: None)
    with funcol.installed():
        for module in (plain, hooked):
            module.weight = nn.Parameter(distribute_tensor(weight, mesh, [*rest, Shard(0)]))
        where = distribute_tensor(indices, mesh, [*rest, Replicate()])
        expected: Any = plain(where)
        result: Any = hooked(where)
        assert result.placements == expected.placements == (*rest, Partial())
        whole = result.full_tensor()
        assert torch.equal(whole, weight[indices])
        if backward:
            whole.sum().backward()
            expected.full_tensor().sum().backward()
            assert torch.equal(hooked.weight.grad.full_tensor(), plain.weight.grad.full_tensor())  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("mesh_shape", [(2,), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_a_hook_keeps_partial_lookups(mesh_shape: tuple[int, ...], backward: bool) -> None:
    run_ranks(keeps_lookups, torch.Size(mesh_shape).numel(), mesh_shape, backward)


@on_ranks(2)
def test_views_of_a_lookup_stay_partial(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    weight = torch.arange(24.0).view(8, 3)
    indices = torch.tensor([[1, 7], [3, 4]])
    with funcol.installed():
        held = distribute_tensor(weight, mesh, [Shard(0)])
        where = distribute_tensor(indices, mesh, [Replicate()])
        for view in (
            lambda x: x.view_as(x),
            lambda x: x.reshape(2, 2, 3),
            lambda x: x.view(4, 3),
            lambda x: x.transpose(0, 1),
            lambda x: x.unsqueeze(0),
        ):
            result = view(nn.functional.embedding(where, held))
            assert result.placements == (Partial(),)
            assert torch.equal(result.full_tensor(), view(weight[indices]))
