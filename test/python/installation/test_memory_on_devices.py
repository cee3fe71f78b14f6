"""Training steps on CUDA devices take no more of the caching allocator's memory with funcol than without.

PyTorch's old process group keeps a collective's inputs until a wait, and funcol's backward passes go
on while collectives that hold up to 4 MiB run: there a step may take so much more. A composite operator whose
gradients are new makes one element, the smallest block, in place of each input that they do not read.

Each side has processes of its own. On simulated devices both run by the same seed and order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import memory_programs as programs
import pytest
import ranks
import torch
from memory_programs import Training
from ranks import run_ranks

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_devices")]

CASES: dict[str, tuple[Callable[..., Training], int, tuple[Any, ...]]] = {
    "FSDP2": (programs.fully_sharded, 2, ()),
    "FSDP2, mixed precision, kept": (programs.fully_sharded, 2, (False, True)),
    "FSDP2, accumulated": (programs.fully_sharded, 2, (True, True, 2)),
    "FSDP2 x tensor parallel": (programs.fully_sharded_and_cut, 4, ()),
    "DTensors on two axes": (programs.all_dtensors, 4, ()),
    "tensor parallel": (programs.tensor_parallel, 2, ()),
    "tensor and sequence parallel": (programs.sequence_parallel, 2, ()),
}
LONG_CASES = {
    "FSDP2, kept": (programs.fully_sharded, 2, (False,)),
    "FSDP2, mixed precision": (programs.fully_sharded, 2, (True, True)),
    "FSDP2, resharded to halves": (programs.fully_sharded, 4, (2,)),
    "FSDP2 x tensor parallel, mixed precision, kept": (programs.fully_sharded_and_cut, 4, (False, True)),
    "HSDP": (programs.replicated_and_sharded, 4, ()),
}


MOST_OF_BACKWARD_PASSES = 4 << 20
SMALLEST_BLOCK = 512  # bytes, of the caching allocator


@pytest.fixture
def most_more(request):
    """Bytes that a step may take above stock's."""
    is_old = torch.__version__ < "2.15" or request.config.getoption("--cuda-backend") != "nccl"
    return SMALLEST_BLOCK + (MOST_OF_BACKWARD_PASSES if is_old else 0)


def takes_no_more_than_stock(program, world, args, most_more):
    found = {}
    for side in ("stock", "funcol"):
        ranks.stop_all()
        found[side] = run_ranks(programs.peaks, world, program, args, side == "funcol", timeout=300)
    for stock, ours in zip(found["stock"], found["funcol"], strict=True):
        more = {peak: (ours[peak], stock[peak]) for peak in stock if ours[peak] > stock[peak] + most_more}
        assert not more, f"bytes with funcol and without: {more}"


@pytest.mark.parametrize("name", CASES)
def test_a_step_takes_no_more_memory_than_stock(name, most_more):
    takes_no_more_than_stock(*CASES[name], most_more)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_CASES)
def test_a_step_of_other_kinds_takes_no_more_memory_than_stock(name, most_more):
    takes_no_more_than_stock(*LONG_CASES[name], most_more)
