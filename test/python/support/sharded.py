"""Tensors under layouts of a mesh: what each rank holds of a full tensor, by ``torch.chunk`` alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranks import device_type, made_once
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import funcol

Order = tuple[tuple[int, tuple[int, ...]], ...]  # (dim, axes that cut it, first cut first)


class Layout(NamedTuple):
    """Placements, an axis a word: ``R``, ``S0``, ``_S0/2`` (split factor 2), ``Psum``; and a shard order.

    Two more are not words of a user's: ``N2``, a result with a pending norm of order 2; ``M``, a tensor that
    has masks, whole before they are made and a sum once they are applied.
    """

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
    """Returns the indices of ``dim`` that the rank at coordinate ``at`` holds, by ``torch.chunk``."""
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
    """Returns random multiples of 6, whose averages over 2 and 3 ranks are exact."""
    generator = torch.Generator(device_type()).manual_seed(hash(seed) % 2**31)
    return (6 * torch.randint(0, 20, like.shape, generator=generator)).to(like.dtype)


def part_of(value: Tensor, op: str, count: int, index: int, *seed: int) -> Tensor:
    """Returns one of ``count`` tensors whose reduction by ``op`` is ``value``."""
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


def _norm_of(order: float) -> Callable[[Tensor], Tensor]:
    return lambda parts: torch.linalg.vector_norm(parts, order, dim=0)


def local_of(whole: Tensor, layout: Layout, mesh_shape: Sequence[int], at: Sequence[int]) -> Tensor:
    """Returns the tensor of the rank at ``at`` if all ranks together hold ``whole`` under ``layout``."""
    for axis, word in enumerate(layout.words):
        if word[0] == "P":
            # The same on all ranks that agree on the partial axes up to this one.
            before = [at[other] for other in range(axis) if layout.words[other][0] == "P"]
            whole = part_of(whole, word[1:], mesh_shape[axis], at[axis], axis, *before)
    return shard_of(whole, layout, mesh_shape, at)


def placed(whole: Tensor, layout: Layout | str, mesh: DeviceMesh, requires_grad: bool = False) -> DTensor:
    """Returns a leaf of ``whole`` under ``layout``; a rank outside of ``mesh`` has an empty local tensor."""
    layout = Layout(tuple(layout.split())) if isinstance(layout, str) else layout
    at, whole = mesh.get_coordinate(), whole.detach()
    local = whole.new_empty(0) if at is None else local_of(whole, layout, mesh.shape, at).clone()
    return DTensor(local, layout.spec(mesh, whole), requires_grad=requires_grad)  # type: ignore[call-arg]


def full(value: Any) -> Any:
    """Returns the full tensor of a DTensor, and anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def reduced(local: Tensor, layout: Layout, mesh: DeviceMesh) -> Tensor:
    for axis in reversed(range(mesh.ndim)):
        word = layout.words[axis]
        if word[0] == "P":
            parts = funcol.all_gather_tensor(local[None], 0, group=mesh.get_group(axis))
            local = _REDUCTIONS[word[1:]](parts).to(local.dtype)
    return local


def reduction_of(
    held: dict[tuple[int, ...], Tensor], layout: Layout, mesh_shape: Sequence[int]
) -> dict[tuple[int, ...], Tensor]:
    """Reduces the partials of ``layout``: returns each rank's result, given the values of each rank."""
    for axis in reversed(range(len(mesh_shape))):
        word = layout.words[axis]
        if word[0] in "PMN":
            reduce = _norm_of(float(word[1:])) if word[0] == "N" else _REDUCTIONS[word[1:] or "sum"]
            peers = {
                at: [held[*at[:axis], index, *at[axis + 1 :]] for index in range(mesh_shape[axis])]
                for at in held
            }
            held = {at: reduce(torch.stack(parts)).to(held[at].dtype) for at, parts in peers.items()}
    return held


@made_once
def mesh_of(shape: tuple[int, ...], *flattened: tuple[str, ...]) -> DeviceMesh:
    """Returns a mesh of the whole world, with groups of its own for the axes in ``flattened``."""
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=tuple("abc"[: len(shape)]))
    for names in flattened:
        mesh[names]._flatten()
    return mesh


def whole_of(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    return (torch.arange(count) * 7 % 101 + 1).to(dtype).view(tuple(shape))


def equals_whole(result: Tensor, whole: Tensor) -> bool:
    """Compares bits. On devices the last ones may differ: NCCL divides by the number of ranks before it adds,
    which rounds the terms of an average where that is not a power of two."""
    num_ranks = dist.get_world_size()
    if result.is_cuda and result.is_floating_point() and num_ranks & (num_ranks - 1):
        error = 1000 * torch.finfo(result.dtype).eps
        return result.dtype == whole.dtype and torch.allclose(result, whole, rtol=error, atol=error)
    return torch.equal(result, whole)


def layouts(*texts: str) -> list[Layout]:
    return [Layout(tuple(text.split())) for text in texts]


def ordered(text: str, *order: tuple[int, tuple[int, ...]]) -> Layout:
    return Layout(tuple(text.split()), order)
