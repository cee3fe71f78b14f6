"""Helpers for the tables of bench_weights.py on gloo ranks: a model's weights, cells of times and bytes."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from runner import median_ratio
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

NUM_RANKS = 4
TIMEOUT_S = 600
NUM_BLOCKS = 33


def llama_shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Returns 300 shapes: 33 blocks of nine, embedding, norm and head."""
    hidden, vocabulary = 4 * width, 8 * width
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, width)}
    of_block = {
        "attention_norm": (width,),
        "query": (width, width),
        "key": (width // 4, width),
        "value": (width // 4, width),
        "output": (width, width),
        "mlp_norm": (width,),
        "gate": (hidden, width),
        "up": (hidden, width),
        "down": (width, hidden),
    }
    for block in range(NUM_BLOCKS):
        shapes |= {f"{block}.{name}": shape for name, shape in of_block.items()}
    return shapes | {"norm": (width,), "head": (vocabulary, width)}


def fully_sharded(shapes: dict[str, tuple[int, ...]], mesh: DeviceMesh) -> dict[str, DTensor]:
    """Returns weights cut by rows along the one axis of ``mesh``, as FSDP2 does; nothing is sent."""
    rank, world = mesh.get_local_rank(), mesh.size()
    weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        chunks = torch.arange(shape[0]).chunk(world)
        rows = len(chunks[rank]) if rank < len(chunks) else 0
        local = torch.full((rows, *shape[1:]), float(number % 7 + rank))
        stride = torch.empty(shape, device="meta").stride()
        weights[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride
        )
    return weights


def ratio(of_sides: dict[str, dict[str, Any]], side: str, other: str) -> float:
    """Returns the median over rounds of one side's time to another's."""
    return median_ratio(of_sides[side]["ms"], of_sides[other]["ms"])


def median_ms(of_side: dict[str, Any]) -> str:
    return f"{statistics.median(of_side['ms']):.1f}"


def mebibytes(of_side: dict[str, Any]) -> str:
    return f"{of_side['bytes'] / 2**20:.2f}"


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
