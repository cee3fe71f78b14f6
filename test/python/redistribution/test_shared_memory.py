"""When the result of a redistribution shares memory with its source: as in PyTorch, only along axes of one
rank, and never where a dim has to be cut anew."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from ranks import on_ranks, run_ranks
from sharded import Layout, local_of, mesh_of, shard_of, whole_of
from torch import Tensor
from torch.distributed.tensor import DTensor

import funcol
from funcol import redistribute, redistribute_many
from funcol.redistribution import redistribute_local_tensor

WORDS = ["R", "S0", "S1", "Psum"]


def of_axes(num_axes: int) -> list[Layout]:
    return [Layout(words) for words in itertools.product(WORDS, repeat=num_axes)]


Move = Callable[[DTensor, Layout], Tensor]

MOVES: dict[str, Move] = {
    "DTensor.redistribute": lambda x, dst: x.redistribute(placements=dst.placements())._local_tensor,
    "redistribute": lambda x, dst: redistribute(x, placements=dst.placements())._local_tensor,
    "redistribute_many": lambda x, dst: redistribute_many([x, x], dst.placements())[0]._local_tensor,
    "redistribute_local_tensor": lambda x, dst: redistribute_local_tensor(
        x._local_tensor, x._spec, dst.spec(x.device_mesh, whole_of(x.shape, x.dtype))
    ),
}


def shares_memory(move: Move, source: DTensor, dst: Layout) -> bool:
    held = source._local_tensor.untyped_storage().data_ptr()
    return move(source, dst).untyped_storage().data_ptr() == held


def shares_as_pytorch(rank: int, world: int, mesh_shape: tuple[int, ...], name: str) -> list[str]:
    mesh = mesh_of(mesh_shape)
    at = mesh.get_coordinate() or ()
    whole = whole_of((4, 6), torch.float64)
    sources = {
        src: DTensor(local_of(whole, src, mesh.shape, at), src.spec(mesh, whole), requires_grad=False)  # type: ignore[call-arg]
        for src in of_axes(mesh.ndim)
    }
    # PyTorch refuses to make partials, or makes them in memory of the source.
    pairs = [
        (src, dst)
        for src, dst in itertools.product(sources, repeat=2)
        if not any(a != b and b[0] == "P" for a, b in zip(src.words, dst.words, strict=True))
    ]
    expected = [shares_memory(MOVES["DTensor.redistribute"], sources[src], dst) for src, dst in pairs]
    with funcol.installed():
        found = [shares_memory(MOVES[name], sources[src], dst) for src, dst in pairs]
    return [
        f"rank {rank}, {src} -> {dst}: {ours}, in PyTorch {theirs}"
        for (src, dst), ours, theirs in zip(pairs, found, expected, strict=True)
        if ours != theirs
    ]


MESHES = [(1,), (2,), (1, 2), (2, 1), (1, 1)]


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("name", MOVES)
def test_a_result_shares_memory_as_in_pytorch(mesh_shape: tuple[int, ...], name: str) -> None:
    world = torch.Size(mesh_shape).numel()
    assert [*itertools.chain(*run_ranks(shares_as_pytorch, world, mesh_shape, name))] == []


@pytest.mark.parametrize("name", MOVES)
@on_ranks(2)
def test_writing_to_a_dim_that_is_cut_anew_leaves_the_source(rank: int, world: int, name: str) -> None:
    mesh = mesh_of((1, world))
    at = mesh.get_coordinate() or ()
    whole = whole_of((4, 6), torch.float64)
    src, dst = Layout(("R", "S0")), Layout(("S0", "S0"))
    source = DTensor(local_of(whole, src, mesh.shape, at), src.spec(mesh, whole), requires_grad=False)  # type: ignore[call-arg]
    with funcol.installed():
        moved = MOVES[name](source, dst)
        moved.zero_()
        assert torch.equal(source._local_tensor, shard_of(whole, src, mesh.shape, at))
