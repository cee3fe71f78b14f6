"""Redistributions from one mesh to another on real ranks, beside shards cut from the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from ranks import device_type, made_once
from redistributed import Item
from sharded import Layout, local_of, reduced, shard_of, whole_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import funcol


class Ends(NamedTuple):
    """The shapes of two meshes, and their ranks, the last axis first."""

    src: tuple[int, ...]
    src_ranks: tuple[int, ...]
    dst: tuple[int, ...]
    dst_ranks: tuple[int, ...]

    def __str__(self) -> str:
        sides = ((self.src, self.src_ranks), (self.dst, self.dst_ranks))
        return " to ".join(f"{'x'.join(map(str, shape))} of {list(ranks)}" for shape, ranks in sides)

    def meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        return mesh_of_ranks(self.src, self.src_ranks), mesh_of_ranks(self.dst, self.dst_ranks)


@made_once
def mesh_of_ranks(shape: tuple[int, ...], ranks: tuple[int, ...]) -> DeviceMesh:
    """To be made on all ranks of the world."""
    return DeviceMesh(
        device_type(),
        torch.tensor(ranks, device="cpu").view(shape),
        mesh_dim_names=tuple("abc"[: len(shape)]),
    )


def placed_on(mesh: DeviceMesh, layout: Layout, whole: Tensor, requires_grad: bool = False) -> DTensor:
    """``whole`` under ``layout``; on a rank outside of ``mesh`` with an empty local tensor."""
    at = mesh.get_coordinate()
    local = whole.new_empty(0) if at is None else local_of(whole, layout, mesh.shape, at)
    return DTensor(local, layout.spec(mesh, whole), requires_grad=requires_grad)  # type: ignore[call-arg]


def wrong_with(result: DTensor, layout: Layout, mesh: DeviceMesh, whole: Tensor) -> str:
    """Returns the differences of ``result`` from ``whole`` under ``layout``, else "". Collective."""
    local = result._local_tensor
    at = mesh.get_coordinate()
    checks = {"spec": result._spec == layout.spec(mesh, whole), "dtype": local.dtype == whole.dtype}
    if at is None:
        checks["empty"] = local.shape == (0,)
    else:
        checks["value"] = torch.equal(reduced(local, layout, mesh), shard_of(whole, layout, mesh.shape, at))
        checks["contiguity"] = local.is_contiguous()
    return ", ".join(name for name, is_right in checks.items() if not is_right)


def complaints(rank: int, world: int, ends: Ends, items: Sequence[Item], **options: Any) -> list[str]:
    """Moves all ``items`` from mesh to mesh in one call; returns the differences."""
    src_mesh, dst_mesh = ends.meshes()
    sources = [placed_on(src_mesh, src, whole_of(shape, dtype)) for shape, dtype, src, _ in items]
    kept = [source._local_tensor.clone() for source in sources]
    targets = [dst.placements() for *_, dst in items]
    results = funcol.redistribute_many(sources, targets, device_mesh=dst_mesh, **options)
    wrong = []
    for item, source, before, result in zip(items, sources, kept, results, strict=True):
        shape, dtype, src, dst = item
        failed = wrong_with(result, dst, dst_mesh, whole_of(shape, dtype))
        if not torch.equal(source._local_tensor, before):
            failed += " input"
        if failed:
            wrong.append(f"rank {rank}, {shape} {dtype} {src} -> {dst}: {failed}")
    return wrong
