"""Redistributions on real ranks beside shards cut from the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sharded import Layout, equals_whole, local_of, mesh_of, reduced, shard_of, whole_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from funcol import redistribute_many
from funcol.redistribution import redistribute_local_tensor


def disagreement(mesh: DeviceMesh, src: Layout, dst: Layout, whole: Tensor, **options: Any) -> str:
    """Returns the differences of the result on this rank, else ""."""
    at = mesh.get_coordinate()
    assert at is not None
    local = local_of(whole, src, mesh.shape, at)
    kept = local.clone()
    try:
        result = redistribute_local_tensor(local, src.spec(mesh, whole), dst.spec(mesh, whole), **options)
    except RuntimeError as error:
        return f"raised {error}"
    expected = shard_of(whole, dst, mesh.shape, at)
    if result.shape != expected.shape:
        return f"shape {tuple(result.shape)}, expected {tuple(expected.shape)}"
    checks = {
        "dtype": result.dtype == whole.dtype,
        "contiguity": result.is_contiguous(),
        "value": equals_whole(reduced(result, dst, mesh), expected),
        "input": torch.equal(local, kept),
        "memory": result is local or not result.numel() or result.data_ptr() != local.data_ptr(),
    }
    return ", ".join(name for name, is_right in checks.items() if not is_right)


# Shape, dtype, from, to.
Item = tuple[tuple[int, ...], torch.dtype, Layout, Layout]


def dtensor_of(whole: Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    local = local_of(whole, layout, mesh.shape, mesh.get_coordinate() or ())
    return DTensor(local, layout.spec(mesh, whole), requires_grad=False)  # type: ignore[call-arg]


def dtensors_of(items: Sequence[Item], mesh: DeviceMesh) -> list[DTensor]:
    return [dtensor_of(whole_of(shape, dtype), src, mesh) for shape, dtype, src, _ in items]


def targets_of(items: Sequence[Item]) -> list[Any]:
    return [dst.placements() for *_, dst in items]


def complaints(rank: int, world: int, mesh_shape: tuple[int, ...], items: list[Item]) -> list[str]:
    mesh = mesh_of(mesh_shape)
    sources = dtensors_of(items, mesh)
    kept = [source.to_local().clone() for source in sources]
    results = redistribute_many(sources, targets_of(items))
    wrong = []
    for item, source, before, result in zip(items, sources, kept, results, strict=True):
        shape, dtype, src, dst = item
        local, whole = result.to_local(), whole_of(shape, dtype)
        checks = {
            "value": torch.equal(
                reduced(local, dst, mesh), shard_of(whole, dst, mesh.shape, mesh.get_coordinate() or ())
            ),
            "spec": result._spec == dst.spec(mesh, whole),
            "contiguity": local.is_contiguous(),
            "input": torch.equal(source.to_local(), before),
            "memory": result._local_tensor is source._local_tensor
            or not local.numel()
            or local.data_ptr() != source.to_local().data_ptr(),
        }
        failed = ", ".join(name for name, is_right in checks.items() if not is_right)
        if failed:
            wrong.append(f"rank {rank}, {shape} {dtype} {src} -> {dst}: {failed}")
    return wrong
