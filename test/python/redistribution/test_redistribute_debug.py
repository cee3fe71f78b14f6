"""Redistribution under PyTorch's DebugMode: noted as stock notes its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import on_ranks, run_ranks
from sharded import Layout, local_of, mesh_of, whole_of
from torch.distributed.tensor import DTensor
from torch.utils._debug_mode import DebugMode

from funcol import redistribute, redistribute_many
from funcol.redistribution import redistribute_local_tensor

ON_DEVICES = True


def lines_of(call: Callable[[], object]) -> list[str]:
    with DebugMode() as mode:
        call()
    return [str(line) for line in mode.debug_string().splitlines()]


def notes(lines: list[str]) -> list[str]:
    return [line for line in lines if "redistribute_input" in line]


def collectives(lines: list[str]) -> list[str]:
    """With the depth at which each is noted."""
    return [
        line.split("(")[0] for line in lines if "_c10d_functional::" in line and "_wrap_tensor" not in line
    ]


def source(src: str, shape: tuple[int, ...]) -> DTensor:
    mesh = mesh_of(shape)
    whole, layout = whole_of((4, 8), torch.float32), Layout(tuple(src.split()))
    local = local_of(whole, layout, mesh.shape, mesh.get_coordinate() or ())
    return DTensor.from_local(local, mesh, layout.placements(), run_check=False)


def is_noted_as_in_stock(rank: int, world: int, shape: tuple[int, ...], src: str, dst: str) -> None:
    tensor, target = source(src, shape), Layout(tuple(dst.split())).placements()
    ours = lines_of(lambda: redistribute(tensor, placements=target))
    stock = lines_of(lambda: tensor.redistribute(placements=target))
    assert len(notes(stock)) == 1
    assert notes(ours) == notes(stock)
    assert collectives(ours) == collectives(stock)


@pytest.mark.parametrize(
    ("shape", "src", "dst"),
    [
        ((2,), "S0", "R"),
        ((2,), "S1", "R"),
        ((2,), "R", "S1"),
        ((2,), "Psum", "R"),
        ((2,), "Psum", "S0"),
        ((2, 2), "S0 R", "S0 S1"),
        ((2, 2), "Psum S1", "S0 S1"),
    ],
)
def test_values_are_noted_as_in_stock(shape: tuple[int, ...], src: str, dst: str) -> None:
    run_ranks(is_noted_as_in_stock, 2 if shape == (2,) else 4, shape, src, dst)


@on_ranks(2)
def test_gradients_are_noted_as_in_stock(rank: int, world: int) -> None:
    target = Layout(("R",)).placements()

    def notes_of(call: Callable[[DTensor], DTensor]) -> list[str]:
        leaf = source("S0", (world,)).requires_grad_()
        lines = notes(lines_of(lambda: torch.autograd.grad(call(leaf).sum(), leaf)))
        # Older releases call gradients explicit, too.
        return [line.strip().replace(" [explicit] ", "") for line in lines]

    ours = notes_of(lambda leaf: redistribute(leaf, placements=target))
    assert len(ours) == 2
    assert ours == notes_of(lambda leaf: leaf.redistribute(placements=target))
    assert ours == notes_of(lambda leaf: redistribute_many([leaf], target)[0])


@on_ranks(2)
def test_many_tensors_and_local_ones_are_noted_and_nothing_is_where_nothing_is_done(
    rank: int, world: int
) -> None:
    tensor, target = source("S0", (world,)), Layout(("R",)).placements()
    spec = Layout(("R",)).spec(tensor.device_mesh, whole_of((4, 8), torch.float32))
    alone = notes(lines_of(lambda: redistribute(tensor, placements=target)))
    many = notes(lines_of(lambda: redistribute_many([tensor] * 3, target)))
    assert many == alone * 3
    local = notes(lines_of(lambda: redistribute_local_tensor(tensor._local_tensor, tensor._spec, spec)))
    assert local == [line.replace(" [explicit] ", "") for line in alone]
    assert notes(lines_of(lambda: redistribute(tensor, placements=tensor.placements))) == []
