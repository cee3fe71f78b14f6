"""Messages between ranks: rectangles of the sender's and of the receiver's local tensor that travel together.
They are packed, sent by one all_to_all, and unpacked. By blocks, only blocks of bytes whose digest changed
since they were sent are sent again."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from .. import _C
from ..redistribution.agreement import Agreement
from ..redistribution.local_redistribute import settled
from ..redistribution.planning import plan_mesh_change
from .export import local_of

_BLOCK_BYTES = 1024
_ROWS_AT_ONCE = 1024  # so that temporaries fit into caches
_LOW = 2**32 - 1

Intervals = tuple[tuple[int, int], ...]
"""Where each interval of a dim begins, and how long it is."""


class MeshLayout(NamedTuple):
    """A mesh and a layout on it, by value."""

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: str
    order: str

    def axes(self) -> dict[str, int]:
        return {f"axis{number}": size for number, size in enumerate(self.mesh_shape)}


@functools.lru_cache(maxsize=4096)
def held_indices(
    layout: MeshLayout, shape: tuple[int, ...], dtype: torch.dtype, rank: int
) -> tuple[Intervals, ...]:
    """Returns the indices that ``rank``, one of those of ``layout``, holds of a tensor, by dim."""
    held = transfer_of(layout, layout, shape, dtype).held(rank)
    assert held is not None
    return held


@functools.lru_cache(maxsize=4096)
def transfer_of(src: MeshLayout, dst: MeshLayout, shape: tuple[int, ...], dtype: torch.dtype) -> _C.Transfer:
    """Returns the messages that move a tensor from ``src`` to ``dst``. Raises ValueError if it is partial."""
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


class LocalPart:
    """The part of a tensor, for a call of ``op``, that this rank has under ``layout``: its indices by dim."""

    def __init__(self, op: str, name: str, tensor: Tensor, layout: MeshLayout, rank: int) -> None:
        self._tensor = tensor
        shape = tuple(tensor.shape)
        self.indices = held_indices(layout, shape, tensor.dtype, rank)
        expected = tuple(sum(size for _, size in intervals) for intervals in self.indices)
        local = local_of(tensor)
        if tuple(local.shape) != expected or local.is_meta or local.layout != torch.strided:
            raise ValueError(
                f"funcol::{op}: the local tensor of '{name}' is {local.layout} on {local.device}, has "
                f"shape {tuple(local.shape)}. Expected memory of shape {expected}, as {layout.placements} "
                "has it: pass the shard that belongs to the placements."
            )

    def pieces(self, indices: Sequence[Intervals], begin: int, size: int) -> list[Piece]:
        """Returns ``size`` elements, from ``begin`` on, of the box of ``indices``, the last dim first. Their
        order is that of the message, which sender and receiver share."""
        lengths = [sum(length for _, length in intervals) for intervals in indices]
        found = []
        for box in _boxes_of(lengths, begin, begin + size):
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
        """Returns the rectangle, in the memory that the tensor has now."""
        tensor = self._tensor
        pointer = settled(tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()
        if pointer != self._pointer:
            self._view, self._pointer = local_of(tensor)[self._slices], pointer
        return self._view


def _boxes_of(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yields rectangles, as bounds by dim, of the elements ``begin`` to ``end`` of a tensor of ``shape``, in
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
        for rest in _boxes_of(shape[1:], offset, stop - row * inner):
            yield (row, row + 1), *rest
        row += 1
    last = end // inner
    if row < last:
        yield (row, last), *((0, length) for length in shape[1:])
        row = last
    if row == last:
        for rest in _boxes_of(shape[1:], 0, end - last * inner):
            yield (last, last + 1), *rest


def _common(one: Intervals, other: Intervals) -> Intervals:
    """Returns the indices that both have."""
    found = []
    for begin, size in one:
        for start, length in other:
            low, high = max(begin, start), min(begin + size, start + length)
            if low < high:
                found.append((low, high - low))
    return tuple(found)


def _slices(wanted: Intervals, held: Intervals, low: int, high: int) -> Iterator[slice]:
    """Yields slices of a tensor that has ``held``, for indices number ``low`` to ``high`` of ``wanted``."""
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


def _kept_pieces(src: LocalPart, dst: LocalPart) -> list[tuple[Piece, Piece]]:
    """Returns the pieces that this rank has of ``src`` and wants under ``dst``."""
    indices: Any = [_common(*pair) for pair in zip(src.indices, dst.indices, strict=True)]
    size = math.prod(sum(length for _, length in intervals) for intervals in indices)
    return [*zip(src.pieces(indices, 0, size), dst.pieces(indices, 0, size), strict=True)]


# Sent together


class Batch:
    """Messages of one dtype. Each use is :meth:`pack`, :meth:`send`, :meth:`unpack`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.cost = 0  # the most bytes that a rank sends and receives
        self.num_tensors = 0
        self._dtype = dtype
        self._sends: dict[int, list[Piece]] = {}
        self._receives: dict[int, list[Piece]] = {}
        self._kept: list[tuple[Piece, Piece]] = []
        self.forget()

    def add(self, transfer: _C.Transfer, rank: int, src: LocalPart | None, dst: LocalPart | None) -> None:
        """Adds the messages of ``rank``, which has ``src`` and wants ``dst``."""
        for message in transfer.messages_of(rank) if src or dst else ():
            box = message.indices, message.begin, message.size
            if message.sender == rank:
                assert src is not None
                self._sends.setdefault(message.receiver, []).extend(src.pieces(*box))
            else:
                assert dst is not None
                self._receives.setdefault(message.sender, []).extend(dst.pieces(*box))
        if src is not None and dst is not None:
            self._kept += _kept_pieces(src, dst)

    def finish(self, ranks: Sequence[int], device: torch.device, by_blocks: bool) -> None:
        """Completes the batch once all messages are added. ``by_blocks``: only changed blocks are sent."""
        self._out = _PieceBuffer(self._sends, ranks, self._dtype, device, by_blocks)
        self._in = _PieceBuffer(self._receives, ranks, self._dtype, device, by_blocks)
        self._by_blocks = by_blocks

    def forget(self) -> None:
        """Makes the next use send all blocks."""
        self._digests: Tensor | None = None

    def pack(self) -> None:
        """Makes the buffers and packs the pieces to send; sends nothing."""
        self._given, self._received = self._out.buffer(), self._in.buffer()
        pieces = self._out.views()
        if pieces:
            torch._foreach_copy_(_split_like(self._given, pieces), pieces)
        if self._by_blocks:
            blocks = self._given.view(torch.uint8).view(-1, _BLOCK_BYTES)
            digests = _digests_of(blocks)
            known, self._digests = self._digests, digests
            self._changed = torch.ones_like(digests, dtype=torch.bool) if known is None else digests != known
            self._given = blocks[self._changed]

    def send(self, agreement: Agreement) -> int:
        """Sends and receives the messages. Returns the bytes that this rank sends."""
        if not self._by_blocks:
            _exchange(self._received, self._given, self._in.num_bytes, self._out.num_bytes, agreement)
            return self._given.nbytes
        blocks = [[count // _BLOCK_BYTES for count in way.num_bytes] for way in (self._in, self._out)]
        marks = self._changed.new_empty(sum(blocks[0]))
        _exchange(marks, self._changed, blocks[0], blocks[1], agreement)
        num_in, num_out = (
            [int(one.sum()) * _BLOCK_BYTES for one in torch.split(of_way, counts)]
            for of_way, counts in zip((marks, self._changed), blocks, strict=True)
        )
        arrived = self._given.new_empty(sum(num_in) // _BLOCK_BYTES, _BLOCK_BYTES)
        _exchange(arrived, self._given, num_in, num_out, agreement)
        self._received.view(torch.uint8).view(-1, _BLOCK_BYTES)[marks] = arrived
        self._changed = marks
        return self._given.nbytes

    def unpack(self) -> None:
        """Writes the data that has arrived, and frees the buffers."""
        for src, dst in self._kept:
            dst.view().copy_(src.view().to(self._dtype))
        pieces = self._in.views()
        received = _split_like(self._received, pieces)
        if pieces and self._by_blocks:
            _copy_changed(pieces, received, self._changed)
        elif pieces:
            torch._foreach_copy_(pieces, received)
        del self._given, self._received


class _PieceBuffer:
    """Pieces that go to, or come from, each of ``ranks``, one after the other in one buffer. With blocks, the
    pieces of a rank begin at a block, and zeros fill its last block."""

    def __init__(
        self,
        pieces: dict[int, list[Piece]],
        ranks: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        by_blocks: bool,
    ) -> None:
        self._dtype, self._device = dtype, device
        self._pieces: list[Piece] = []
        self.num_bytes: list[int] = []  # by rank
        for rank in ranks:
            of_rank = pieces.get(rank, [])
            count = sum(piece.numel for piece in of_rank)
            rest = -count % (_BLOCK_BYTES // dtype.itemsize) if by_blocks else 0
            if rest:
                zeros = torch.zeros(rest, dtype=dtype, device=device)
                of_rank = [*of_rank, Piece(zeros, (slice(None),))]
            self._pieces += of_rank
            self.num_bytes.append((count + rest) * dtype.itemsize)

    def views(self) -> list[Tensor]:
        return [piece.view() for piece in self._pieces]

    def buffer(self) -> Tensor:
        num_elements = sum(self.num_bytes) // self._dtype.itemsize
        return torch.empty(num_elements, dtype=self._dtype, device=self._device)


def _split_like(flat: Tensor, pieces: list[Tensor]) -> list[Tensor]:
    """Returns views of ``flat``, one after the other, with the shapes of ``pieces``."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, pieces))


def _exchange(
    received: Tensor, given: Tensor, num_in: list[int], num_out: list[int], agreement: Agreement
) -> None:
    """Moves bytes by one all_to_all. A rank without a group has nothing to send."""
    if agreement.group is not None:
        into, out = (one.view(torch.uint8).flatten() for one in (received, given))
        dist.all_to_all_single(into, out, num_in, num_out, agreement.group)


# Blocks


def _digests_of(blocks: Tensor) -> Tensor:
    """Returns a digest for each row of bytes of ``blocks``. Rows that differ in one word of 8 bytes have
    different digests; other rows have equal ones only by chance, one of 2^60."""
    multiplier, weights = _factors(blocks.device)
    found = []
    for rows in torch.split(blocks.view(torch.int64), _ROWS_AT_ONCE):
        mixed = (rows ^ ((rows >> 32) & _LOW)) * multiplier
        found.append(((mixed ^ ((mixed >> 32) & _LOW)) * weights).sum(1))
    return torch.cat(found) if found else blocks.new_empty(0, dtype=torch.int64)


@functools.cache
def _factors(device: torch.device) -> tuple[int, Tensor]:
    """Returns a multiplier and weights, equal on every rank. They are odd: multiplication loses nothing."""
    generator = random.Random(0)
    multiplier, *weights = (generator.getrandbits(63) * 2 + 1 - 2**63 for _ in range(1 + _BLOCK_BYTES // 8))
    return multiplier, torch.tensor(weights, device=device)


def _copy_changed(pieces: list[Tensor], received: list[Tensor], changed: Tensor) -> None:
    """Copies ``received``, whose elements lie one after the other in blocks, into ``pieces``, where the block
    is ``changed``."""
    per_block = _BLOCK_BYTES // received[0].element_size()
    sizes = torch.tensor([piece.numel() for piece in pieces], device="cpu")
    ends = sizes.cumsum(0)
    begins, marks = ends - sizes, changed.cpu()
    first, last = begins // per_block, (ends - 1) // per_block
    before = functional.pad(marks.cumsum(0), (1, 0))
    counts = before[last + 1] - before[first]
    is_whole = counts == last - first + 1
    for index in counts.nonzero().flatten().tolist():
        piece, given = pieces[index], received[index]
        if not is_whole[index]:
            of_blocks = marks[first[index] : last[index] + 1].repeat_interleave(per_block)
            start = int(begins[index] - first[index] * per_block)
            mask = of_blocks[start : start + piece.numel()].view(piece.shape).to(piece.device)
            given = torch.where(mask, given.to(piece.device, piece.dtype), piece)
        piece.copy_(given)
