"""Messages of a transfer as rectangles of the sender's and of the receiver's local tensor."""

from __future__ import annotations

import ast
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _C
from ..redistribution.local_redistribute import settled
from ..redistribution.planning import plan_mesh_change
from .export import local_of

Intervals = tuple[tuple[int, int], ...]
"""Where each interval of a dim begins, and how long it is."""


class Place(NamedTuple):
    """A mesh and a layout on it, by value."""

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: str
    order: str

    def axes(self) -> dict[str, int]:
        return {f"axis{number}": size for number, size in enumerate(self.mesh_shape)}


@functools.lru_cache(maxsize=4096)
def held_indices(
    place: Place, shape: tuple[int, ...], dtype: torch.dtype, rank: int
) -> tuple[Intervals, ...]:
    """The indices that ``rank``, one of those of ``place``, holds of a tensor, by dim."""
    held = transfer_of(place, place, shape, dtype).held(rank)
    assert held is not None
    return held


@functools.lru_cache(maxsize=4096)
def transfer_of(src: Place, dst: Place, shape: tuple[int, ...], dtype: torch.dtype) -> _C.Transfer:
    """The messages that take a tensor from ``src`` to ``dst``. ``ValueError`` if it is partial."""
    return plan_mesh_change(
        src.placements,
        dst.placements,
        src.axes(),
        dst.axes(),
        shape,
        dtype,
        ranks=src.ranks,
        to_ranks=dst.ranks,
        src_shard_order=ast.literal_eval(src.order or "None"),
        dst_shard_order=ast.literal_eval(dst.order or "None"),
    ).as_transfer()


class Held:
    """The part of a tensor of a call of ``op`` that this rank has under ``place``: :attr:`indices` by dim."""

    def __init__(self, op: str, name: str, tensor: Tensor, place: Place, rank: int) -> None:
        self._tensor = tensor
        shape = tuple(tensor.shape)
        self.indices = held_indices(place, shape, tensor.dtype, rank)
        expected = tuple(sum(size for _, size in intervals) for intervals in self.indices)
        local = local_of(tensor)
        if tuple(local.shape) != expected or local.is_meta or local.layout != torch.strided:
            raise ValueError(
                f"funcol::{op}: the local tensor of '{name}' is {local.layout} on {local.device}, has "
                f"shape {tuple(local.shape)}. Expected memory of shape {expected}, as {place.placements} has "
                "it: pass the shard that belongs to the placements."
            )

    def pieces(self, indices: Sequence[Intervals], begin: int, size: int) -> list[Piece]:
        """Elements ``begin``, ... of the box of ``indices``, the last dim first. Their order is that of the
        message: sender and receiver have it in common."""
        lengths = [sum(length for _, length in intervals) for intervals in indices]
        found = []
        for box in boxes_of(lengths, begin, begin + size):
            by_dim = [
                [*_slices(wanted, held, *bounds)]
                for wanted, held, bounds in zip(indices, self.indices, box, strict=True)
            ]
            found += [Piece(self._tensor, slices) for slices in itertools.product(*by_dim)]
        return found


class Piece:
    """A rectangle of a tensor's local tensor."""

    def __init__(self, tensor: Tensor, slices: tuple[slice, ...]) -> None:
        self._tensor = tensor
        self._slices = slices
        self._pointer = 0
        self._view = self.view()
        self.numel = self._view.numel()

    def view(self) -> Tensor:
        """The rectangle, in the memory that the tensor has now."""
        tensor = self._tensor
        pointer = settled(tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()
        if pointer != self._pointer:
            self._view, self._pointer = local_of(tensor)[self._slices], pointer
        return self._view


def boxes_of(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Rectangles, as bounds by dim, of the elements ``begin`` to ``end`` of a tensor of ``shape``, in their
    order."""
    if end <= begin:
        return
    if begin == 0 and end == math.prod(shape):
        yield tuple((0, length) for length in shape)
        return
    inner = math.prod(shape[1:])
    row, offset = divmod(begin, inner)
    if offset:
        stop = min(end, (row + 1) * inner)
        for rest in boxes_of(shape[1:], offset, stop - row * inner):
            yield (row, row + 1), *rest
        row += 1
    last = end // inner
    if row < last:
        yield (row, last), *((0, length) for length in shape[1:])
        row = last
    if row == last:
        for rest in boxes_of(shape[1:], 0, end - last * inner):
            yield (last, last + 1), *rest


def common(one: Intervals, other: Intervals) -> Intervals:
    """The indices that both have."""
    found = []
    for begin, size in one:
        for start, length in other:
            low, high = max(begin, start), min(begin + size, start + length)
            if low < high:
                found.append((low, high - low))
    return tuple(found)


def _slices(wanted: Intervals, held: Intervals, low: int, high: int) -> Iterator[slice]:
    """Where the indices number ``low`` to ``high`` of ``wanted`` are in a tensor that has ``held``."""
    passed = 0
    for begin, size in wanted:
        first, last = max(low - passed, 0), min(high - passed, size)
        passed += size
        if first >= last:
            continue
        place = 0
        for start, length in held:
            if start <= begin < start + length:
                yield slice(place + begin - start + first, place + begin - start + last)
            place += length


def kept_pieces(src: Held, dst: Held) -> list[tuple[Piece, Piece]]:
    """Returns the pieces that this rank has of ``src`` and wants under ``dst``."""
    indices: Any = [common(*pair) for pair in zip(src.indices, dst.indices, strict=True)]
    size = math.prod(sum(length for _, length in intervals) for intervals in indices)
    return [*zip(src.pieces(indices, 0, size), dst.pieces(indices, 0, size), strict=True)]
