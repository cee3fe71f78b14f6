"""Blocks of bytes that changed since they were sent, by a digest of each."""

from __future__ import annotations

import functools
import random

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_BYTES = 1024
_ROWS_AT_ONCE = 1024  # so that temporaries fit into caches
_LOW = 2**32 - 1


def digests_of(blocks: Tensor) -> Tensor:
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
    multiplier, *weights = (generator.getrandbits(63) * 2 + 1 - 2**63 for _ in range(1 + BLOCK_BYTES // 8))
    return multiplier, torch.tensor(weights, device=device)


def copy_changed(pieces: list[Tensor], received: list[Tensor], changed: Tensor) -> None:
    """Copies those elements of ``received``, which lie one after the other in blocks, into ``pieces`` whose
    block is ``changed``."""
    per_block = BLOCK_BYTES // received[0].element_size()
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
