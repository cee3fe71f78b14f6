"""Ranks agree on a batch that goes to another mesh before anything of it is sent."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from against_full_tensor import Ends, differences, mesh_of_ranks
from ranks import run_ranks
from sharded import Layout, placed, whole_of
from torch.distributed.device_mesh import DeviceMesh

import funcol

ON_DEVICES = True

DISJOINT = Ends((2,), (0, 1), (2,), (2, 3))
# Rank 3 is in neither mesh.
IN_PAIRS = Ends((2,), (0, 1), (2,), (1, 2))

# The arguments of rank 1 that differ, and the error of all ranks.
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": torch.int32}, "the dtype of 'tensor 1' is torch.int32 on rank 1, torch.float32 on"),
    "shape": ({"shape": (6, 4)}, "the shape of 'tensor 1' is (6, 4) on rank 1, (6, 2) on"),
    "placements": ({"src": "R"}, "the placements of 'tensor 1' is (Replicate(),) on rank 1"),
    "target": ({"dst": "R"}, "the target of 'tensor 1' is (Replicate(),) on rank 1"),
    "number": ({"number": 3}, "tensor 3 is missing on rank 1"),
    "option": ({"max_bytes": 64}, "max_bytes is 64 on rank 1, None on"),
}


def batch(
    meshes: tuple[DeviceMesh, DeviceMesh],
    number: int = 4,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (6, 2),
    src: str = "S0",
    dst: str = "S1",
    max_bytes: int | None = None,
) -> list[str]:
    """Moves tensors, of which number 1 is as the arguments say. Returns how the results are wrong."""
    src_mesh, dst_mesh = meshes
    wholes = [whole_of((6, 2), torch.float32) for _ in range(number)]
    wholes[1] = whole_of(shape, dtype)
    layouts, targets = [Layout(("S0",))] * number, [Layout(("S1",))] * number
    layouts[1], targets[1] = Layout((src,)), Layout((dst,))
    results = funcol.redistribute_many(
        [placed(whole, layout, src_mesh) for layout, whole in zip(layouts, wholes, strict=True)],
        [target.placements() for target in targets],
        device_mesh=dst_mesh,
        max_bytes=max_bytes,
    )
    return [
        differences(result, target, dst_mesh, whole)
        for result, target, whole in zip(results, targets, wholes, strict=True)
    ]


def differ(rank: int, world: int, ends: Ends, which: str) -> list[str]:
    meshes = ends.meshes()  # NCCL splits the world's communicator, for which all ranks call
    if rank == 3 and ends == IN_PAIRS:
        return []  # has no part in it, and does not call
    arguments, error = DIFFERENCES[which]
    with pytest.raises(ValueError, match=re.escape(error)):
        batch(meshes, **(arguments if rank == 1 else {}))
    return batch(meshes)  # the ranks are still in step


@pytest.mark.parametrize("which", DIFFERENCES)
@pytest.mark.parametrize("ends", [DISJOINT, IN_PAIRS], ids=str)
def test_ranks_that_differ_all_get_the_first_difference(ends: Ends, which: str) -> None:
    for wrong in run_ranks(differ, 4, ends, which):
        assert not any(wrong)


def lists_meshes_in_another_order(rank: int, world: int) -> list[str]:
    first, second, to = (mesh_of_ranks((2,), ranks) for ranks in ((0, 1), (1, 2), (2, 3)))
    whole = whole_of((6, 2), torch.float32)
    sources = [placed(whole, Layout(("S0",)), mesh) for mesh in (first, second)]
    listed = sources[::-1] if rank % 2 else sources
    results = funcol.redistribute_many(listed, Layout(("S1",)).placements(), device_mesh=to)
    return [differences(result, Layout(("S1",)), to, whole) for result in results]


def test_meshes_may_be_listed_in_any_order() -> None:
    for wrong in run_ranks(lists_meshes_in_another_order, 4):
        assert not any(wrong)
