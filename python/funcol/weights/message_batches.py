"""Messages between ranks that travel together: packed, sent by one all_to_all, unpacked. With blocks, only
blocks of bytes that changed since they were sent go, by a digest of each."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from .. import _C
from ..redistribution.agreement import Agreement
from .pieces import Held, Piece, kept_pieces

_BLOCK_BYTES = 1024
_ROWS_AT_ONCE = 1024  # so that temporaries fit into caches
_LOW = 2**32 - 1


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

    def add(self, transfer: _C.Transfer, rank: int, src: Held | None, dst: Held | None) -> None:
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
            self._kept += kept_pieces(src, dst)

    def finish(self, ranks: Sequence[int], device: torch.device, by_blocks: bool) -> None:
        """Has all messages; ``by_blocks``: only blocks that changed are to be sent."""
        self._out = _Way(self._sends, ranks, self._dtype, device, by_blocks)
        self._in = _Way(self._receives, ranks, self._dtype, device, by_blocks)
        self._by_blocks = by_blocks

    def forget(self) -> None:
        """Makes the next use send all blocks."""
        self._digests: Tensor | None = None

    def pack(self) -> None:
        """Makes the buffers; sends nothing."""
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
        """Returns the bytes that this rank sends."""
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
        """Writes what has arrived, and frees the buffers."""
        for src, dst in self._kept:
            dst.view().copy_(src.view().to(self._dtype))
        pieces = self._in.views()
        received = _split_like(self._received, pieces)
        if pieces and self._by_blocks:
            _copy_changed(pieces, received, self._changed)
        elif pieces:
            torch._foreach_copy_(pieces, received)
        del self._given, self._received


class _Way:
    """Pieces that go to, or come from, each of ``ranks``, one after the other in one buffer. With blocks,
    the pieces of a rank begin one, and zeros fill the last one."""

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
    """A number for each row of bytes of ``blocks``. Rows that differ in one word of 8 bytes differ in it;
    others are equal in it by chance alone, one of 2^60."""
    multiplier, weights = _factors(blocks.device)
    found = []
    for rows in torch.split(blocks.view(torch.int64), _ROWS_AT_ONCE):
        mixed = (rows ^ ((rows >> 32) & _LOW)) * multiplier
        found.append(((mixed ^ ((mixed >> 32) & _LOW)) * weights).sum(1))
    return torch.cat(found) if found else blocks.new_empty(0, dtype=torch.int64)


@functools.cache
def _factors(device: torch.device) -> tuple[int, Tensor]:
    """Odd numbers, by which multiplication loses nothing: the same on every rank."""
    generator = random.Random(0)
    multiplier, *weights = (generator.getrandbits(63) * 2 + 1 - 2**63 for _ in range(1 + _BLOCK_BYTES // 8))
    return multiplier, torch.tensor(weights, device=device)


def _copy_changed(pieces: list[Tensor], received: list[Tensor], changed: Tensor) -> None:
    """Copies those elements of ``received``, which lie one after the other in blocks, into ``pieces`` whose
    block is ``changed``."""
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
