"""Redistributions and exports on real ranks, checked against shards that are cut from the full tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from ranks import device_type, made_once
from sharded import Layout, equals_whole, local_of, mesh_of, placed, reduced, shard_of, whole_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import funcol
from funcol.redistribution import redistribute_local_tensor

# Shape, dtype, from, to.
Item = tuple[tuple[int, ...], torch.dtype, Layout, Layout]


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
    """Makes a mesh of some ranks; all ranks of the world have to call it."""
    return DeviceMesh(
        device_type(),
        torch.tensor(ranks, device="cpu").view(shape),
        mesh_dim_names=tuple("abc"[: len(shape)]),
    )


def own_shard(whole: Tensor, layout: Layout, mesh: DeviceMesh) -> Tensor:
    return shard_of(whole, layout, mesh.shape, mesh.get_coordinate() or ())


def dtensors_of(items: Sequence[Item], mesh: DeviceMesh) -> list[DTensor]:
    return [placed(whole_of(shape, dtype), src, mesh) for shape, dtype, src, _ in items]


def targets_of(items: Sequence[Item]) -> list[Any]:
    return [dst.placements() for *_, dst in items]


def differences(result: DTensor, layout: Layout, mesh: DeviceMesh, whole: Tensor) -> str:
    """Returns the differences of ``result`` from ``whole`` under ``layout``, else "". Collective."""
    local, at = result._local_tensor, mesh.get_coordinate()
    checks = {"spec": result._spec == layout.spec(mesh, whole), "dtype": local.dtype == whole.dtype}
    if at is None:
        checks["empty"] = local.shape == (0,)
    else:
        checks["value"] = torch.equal(reduced(local, layout, mesh), shard_of(whole, layout, mesh.shape, at))
        checks["contiguity"] = local.is_contiguous()
    return failed(checks)


def failed(checks: dict[str, bool]) -> str:
    return ", ".join(name for name, is_right in checks.items() if not is_right)


def has_own_memory(result: Tensor, source: Tensor) -> bool:
    """Returns true if the tensors share no memory, unless they are one object."""
    return result is source or not result.numel() or result.data_ptr() != source.data_ptr()


def local_differences(mesh: DeviceMesh, src: Layout, dst: Layout, whole: Tensor, **options: Any) -> str:
    """Redistributes this rank's local tensor; returns the differences of the result, else ""."""
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
    return failed(
        {
            "dtype": result.dtype == whole.dtype,
            "contiguity": result.is_contiguous(),
            "value": equals_whole(reduced(result, dst, mesh), expected),
            "input": torch.equal(local, kept),
            "memory": has_own_memory(result, local),
        }
    )


def _errors(
    rank: int,
    items: Sequence[Item],
    meshes: tuple[DeviceMesh, DeviceMesh],
    redistribute: Callable[[list[DTensor], list[Any]], list[DTensor]],
) -> list[str]:
    sources = dtensors_of(items, meshes[0])
    kept = [source._local_tensor.clone() for source in sources]
    results = redistribute(sources, targets_of(items))
    errors = []
    for item, source, before, result in zip(items, sources, kept, results, strict=True):
        shape, dtype, src, dst = item
        found = differences(result, dst, meshes[1], whole_of(shape, dtype))
        checks = {
            "input": torch.equal(source._local_tensor, before),
            "memory": has_own_memory(result._local_tensor, source._local_tensor),
        }
        if texts := [text for text in (found, failed(checks)) if text]:
            errors.append(f"rank {rank}, {shape} {dtype} {src} -> {dst}: {', '.join(texts)}")
    return errors


def redistribution_errors(
    rank: int, world: int, mesh_shape: tuple[int, ...], items: Sequence[Item]
) -> list[str]:
    """Redistributes all ``items`` in one call; returns the errors of the results on this rank."""
    mesh = mesh_of(mesh_shape)
    return _errors(rank, items, (mesh, mesh), funcol.redistribute_many)


def cross_mesh_errors(rank: int, world: int, ends: Ends, items: Sequence[Item], **options: Any) -> list[str]:
    """Moves all ``items`` from mesh to mesh in one call; returns the errors of the results on this rank."""
    meshes = ends.meshes()

    def redistribute(sources: list[DTensor], targets: list[Any]) -> list[DTensor]:
        return funcol.redistribute_many(sources, targets, device_mesh=meshes[1], **options)

    return _errors(rank, items, meshes, redistribute)


def named_of(items: Sequence[Item], mesh_shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Returns a DTensor for each item, by names of their layouts; the targets of the items do not matter."""
    return {
        f"{index} {shape} {src}": placed(whole_of(shape, dtype), src, mesh_of(mesh_shape))
        for index, (shape, dtype, src, _) in enumerate(items)
    }


def items_of(
    shapes: Sequence[tuple[int, ...]], chosen: Sequence[Layout], dtype: torch.dtype = torch.float64
) -> list[Item]:
    return [(shape, dtype, src, src) for shape, src in itertools.product(shapes, chosen)]


def export_errors(
    rank: int, world: int, mesh_shape: tuple[int, ...], items: list[Item], options: dict[str, Any]
) -> list[str]:
    """Exports all ``items`` as full tensors; returns the errors on this rank."""
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
