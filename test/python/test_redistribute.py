"""Redistribution on real ranks: every shard is the one cut from the full tensor, bit for bit."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor as stock_redistribute
from torch.distributed.tensor.placement_types import _StridedShard

import funcol
from funcol.redistribution import redistribute_local_tensor

Order = tuple[tuple[int, tuple[int, ...]], ...]  # (dim, axes that cut it, first cut first)


class Layout(NamedTuple):
    """Placements as text, an axis a word: ``R``, ``S0``, ``_S0/2`` (split factor), ``Psum``; and a shard order."""

    words: tuple[str, ...]
    order: Order | None = None

    def __str__(self) -> str:
        return " ".join(self.words) + ("" if self.order is None else f" {self.order}")

    def placements(self) -> tuple[Placement, ...]:
        return tuple(_placement(word) for word in self.words)

    def spec(self, mesh: DeviceMesh, whole: Tensor) -> DTensorSpec:
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        order = None if self.order is None else tuple(ShardOrderEntry(*entry) for entry in self.order)
        return DTensorSpec(mesh, self.placements(), tensor_meta=meta, shard_order=order)  # type: ignore[arg-type]

    def axes_of(self, dim: int) -> Sequence[int]:
        if self.order is not None:
            return dict(self.order).get(dim, ())
        return [axis for axis, word in enumerate(self.words) if _cuts(word, dim)]


def _placement(word: str) -> Placement:
    if word == "R":
        return Replicate()
    if word[0] == "P":
        return Partial(word[1:])
    if word[0] == "_":
        dim, factor = word[2:].split("/")
        return _StridedShard(int(dim), split_factor=int(factor))
    return Shard(int(word[1:]))


def _cuts(word: str, dim: int) -> bool:
    return word.lstrip("_").startswith(f"S{dim}")


def _chunk(whole: Tensor, count: int, index: int) -> Tensor:
    chunks = whole.chunk(count)
    return chunks[index] if index < len(chunks) and whole.numel() else whole[:0]


def held_indices(layout: Layout, mesh_shape: Sequence[int], dim: int, size: int, at: Sequence[int]) -> Tensor:
    """The indices of ``dim`` that the rank at coordinate ``at`` holds, by ``torch.chunk``."""
    held = torch.arange(size)
    for axis in layout.axes_of(dim):
        word = layout.words[axis]
        factor = int(word.split("/")[1]) if "/" in word else 1
        held = torch.cat([_chunk(piece, mesh_shape[axis], at[axis]) for piece in held.chunk(factor)])
    return held


def shard_of(whole: Tensor, layout: Layout, mesh_shape: Sequence[int], at: Sequence[int]) -> Tensor:
    for dim in range(whole.dim()):
        whole = whole.index_select(dim, held_indices(layout, mesh_shape, dim, whole.shape[dim], at))
    return whole.contiguous()


def _noise(like: Tensor, *seed: int) -> Tensor:
    """Multiples of 6, so that averages of 2 and 3 ranks are exact."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return (6 * torch.randint(0, 20, like.shape, generator=generator)).to(like.dtype)


def part_of(value: Tensor, op: str, count: int, index: int, *seed: int) -> Tensor:
    """One of ``count`` tensors whose reduction by ``op`` is ``value``."""
    noise = [_noise(value, *seed, other) for other in range(count)]
    others = noise[1:]
    if op in ("sum", "avg"):
        first = functools.reduce(torch.sub, others, value * (count if op == "avg" else 1))
        return first if index == 0 else noise[index]
    if op == "product":
        return value if index == 0 else torch.ones_like(value)
    if op == "bxor":
        return functools.reduce(torch.bitwise_xor, others, value) if index == 0 else noise[index]
    mixed: dict[str, Callable[[], Tensor]] = {
        "min": lambda: value + noise[index],
        "max": lambda: value - noise[index],
        "band": lambda: value | noise[index],
        "bor": lambda: value & noise[index],
    }
    return value if index == count - 1 else mixed[op]()


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda parts: parts.sum(0),
    "avg": lambda parts: parts.sum(0) / len(parts),
    "product": lambda parts: parts.prod(0),
    "min": lambda parts: parts.amin(0),
    "max": lambda parts: parts.amax(0),
    "band": lambda parts: functools.reduce(torch.bitwise_and, parts),
    "bor": lambda parts: functools.reduce(torch.bitwise_or, parts),
    "bxor": lambda parts: functools.reduce(torch.bitwise_xor, parts),
}


def local_of(whole: Tensor, layout: Layout, mesh_shape: Sequence[int], at: Sequence[int]) -> Tensor:
    """A tensor for the rank at ``at``, such that all ranks together hold ``whole`` under ``layout``."""
    for axis, word in enumerate(layout.words):
        if word[0] == "P":
            # The same on all ranks that agree on the partial axes up to this one.
            before = [at[other] for other in range(axis) if layout.words[other][0] == "P"]
            whole = part_of(whole, word[1:], mesh_shape[axis], at[axis], axis, *before)
    return shard_of(whole, layout, mesh_shape, at)


def reduced(local: Tensor, layout: Layout, mesh: DeviceMesh) -> Tensor:
    for axis in reversed(range(mesh.ndim)):
        word = layout.words[axis]
        if word[0] == "P":
            parts = funcol.all_gather_tensor(local[None], 0, group=mesh.get_group(axis))
            local = _REDUCTIONS[word[1:]](parts).to(local.dtype)
    return local


_meshes: dict[Any, DeviceMesh] = {}


def mesh_of(shape: tuple[int, ...], *flattened: tuple[str, ...]) -> DeviceMesh:
    """A mesh of the whole world, with groups of its own for the axes in ``flattened``; made once."""
    key = (shape, flattened)
    if key not in _meshes:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
        for names in flattened:
            mesh[names]._flatten()
        _meshes[key] = mesh
    return _meshes[key]


def whole_of(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    return (torch.arange(count) * 7 % 101 + 1).to(dtype).view(*shape)


def disagreement(mesh: DeviceMesh, src: Layout, dst: Layout, whole: Tensor) -> str:
    """What is wrong with the result on this rank; nothing if all is well."""
    at = mesh.get_coordinate()
    assert at is not None
    local = local_of(whole, src, mesh.shape, at)
    kept = local.clone()
    try:
        result = redistribute_local_tensor(local, src.spec(mesh, whole), dst.spec(mesh, whole))
    except RuntimeError as error:
        return f"raised {error}"
    expected = shard_of(whole, dst, mesh.shape, at)
    if result.shape != expected.shape:
        return f"shape {tuple(result.shape)}, expected {tuple(expected.shape)}"
    checks = {
        "dtype": result.dtype == whole.dtype,
        "contiguity": result.is_contiguous(),
        "value": torch.equal(reduced(result, dst, mesh), expected),
        "input": torch.equal(local, kept),
        "memory": result is local or not result.numel() or result.data_ptr() != local.data_ptr(),
    }
    return ", ".join(name for name, is_right in checks.items() if not is_right)


def redistributes(
    rank: int,
    world: int,
    mesh_shape: tuple[int, ...],
    flattened: tuple[tuple[str, ...], ...],
    pairs: list[tuple[Layout, Layout]],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
) -> list[str]:
    mesh = mesh_of(mesh_shape, *flattened)
    wrong = []
    for shape, (src, dst) in itertools.product(shapes, pairs):
        complaint = disagreement(mesh, src, dst, whole_of(shape, dtype))
        if complaint:
            wrong.append(f"rank {rank}, {shape} {src} -> {dst}: {complaint}")
    return wrong


def layouts(*texts: str) -> list[Layout]:
    return [Layout(tuple(text.split())) for text in texts]


def ordered(text: str, *order: tuple[int, tuple[int, ...]]) -> Layout:
    return Layout(tuple(text.split()), order)


SHAPES = [(8, 12), (5, 3), (1, 7), (0, 4)]

ONE_AXIS = layouts("R", "S0", "S1", "_S0/2", "_S1/3", "_S0/5", "Psum", "Pavg", "Pmax", "Pmin", "Pproduct")
ONE_AXIS_OF_BITS = layouts("R", "S0", "Psum", "Pmin", "Pproduct", "Pband", "Pbor", "Pbxor")
TWO_AXES = [
    *layouts("R R", "S0 R", "R S0", "S0 S0", "S0 S1", "S1 S0", "S1 S1", "_S0/2 S0", "_S0/3 S1", "S0 _S0/2"),
    *layouts("Psum R", "Psum Psum", "Pavg Psum", "S0 Psum", "Pmax S1"),
    ordered("S0 S0", (0, (1, 0))),
    ordered("S1 S1", (1, (1, 0))),
]
THREE_AXES = [
    *layouts("R R R", "S0 S0 S0", "S0 S1 S0", "S1 R S0", "Psum S0 Psum", "R S0 S0", "_S0/2 S0 S1"),
    ordered("S0 S0 S0", (0, (2, 0, 1))),
]


def pairs_of(chosen: list[Layout]) -> list[tuple[Layout, Layout]]:
    return list(itertools.product(chosen, chosen))


def is_right(
    mesh_shape: tuple[int, ...],
    pairs: list[tuple[Layout, Layout]],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    *flattened: tuple[str, ...],
) -> None:
    args = (mesh_shape, flattened, pairs, shapes, dtype)
    wrong = sum(run_ranks(redistributes, math.prod(mesh_shape), *args), [])
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:40])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_pair_of_layouts_of_one_axis_gives_the_shards_of_the_full_tensor(world: int) -> None:
    is_right((world,), pairs_of(ONE_AXIS), SHAPES, torch.float64)


@pytest.mark.parametrize("world", [2, 3])
def test_reductions_of_integers_are_exact(world: int) -> None:
    is_right((world,), pairs_of(ONE_AXIS_OF_BITS), SHAPES, torch.int64)


@pytest.mark.parametrize("flattened", [[], [("a", "b")]], ids=["separate", "flattened"])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2)])
def test_every_pair_of_layouts_of_two_axes_gives_the_shards_of_the_full_tensor(
    mesh_shape: tuple[int, ...], flattened: list[tuple[str, ...]]
) -> None:
    is_right(mesh_shape, pairs_of(TWO_AXES), SHAPES[1:] if flattened else SHAPES, torch.float64, *flattened)


def test_every_pair_of_layouts_of_three_axes_gives_the_shards_of_the_full_tensor() -> None:
    is_right((2, 2, 2), pairs_of(THREE_AXES), [(9, 5)], torch.int64, ("a", "c"))
