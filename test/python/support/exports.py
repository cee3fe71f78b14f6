"""Exports of whole tensors on real ranks, beside the wholes that the shards were cut from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from redistributed import Item, dtensor_of
from sharded import Layout, equals_whole, mesh_of, whole_of
from torch import Tensor
from torch.distributed.tensor import DTensor

import funcol


def named_of(items: Sequence[Item], mesh_shape: tuple[int, ...]) -> dict[str, Tensor]:
    """A DTensor an item, by names of their layouts; the targets of the items do not matter."""
    mesh = mesh_of(mesh_shape)
    return {
        f"{index} {shape} {src}": dtensor_of(whole_of(shape, dtype), src, mesh)
        for index, (shape, dtype, src, _) in enumerate(items)
    }


def items_of(
    shapes: Sequence[tuple[int, ...]], chosen: Sequence[Layout], dtype: torch.dtype = torch.float64
) -> list[Item]:
    return [(shape, dtype, src, src) for shape, src in itertools.product(shapes, chosen)]


def complaints(
    rank: int, world: int, mesh_shape: tuple[int, ...], items: list[Item], options: dict[str, Any]
) -> list[str]:
    """Returns the errors of an export on this rank; an empty list if there are none."""
    named = named_of(items, mesh_shape)
    kept = {name: tensor.to_local().clone() for name, tensor in named.items() if isinstance(tensor, DTensor)}
    is_receiver = options.get("to") in (None, rank)
    wrong = []
    names = []
    for (shape, dtype, *_), (name, whole) in zip(items, funcol.full_tensors(named, **options), strict=True):
        names.append(name)
        if not is_receiver:
            wrong += [] if whole is None else [f"rank {rank}, {name}: a tensor, expected None"]
        elif whole is None or not equals_whole(whole, whole_of(shape, dtype)):
            wrong.append(f"rank {rank}, {name}: {whole}")
    wrong += [] if names == list(named) else [f"rank {rank}: {names}"]
    for name, before in kept.items():
        wrong += [] if torch.equal(named[name].to_local(), before) else [f"rank {rank}, {name} has changed"]  # type: ignore[attr-defined]
    return wrong
