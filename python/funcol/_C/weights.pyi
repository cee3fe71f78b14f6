"""Full tensors, for every rank, for one rank, or for owners."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement

EVERY_RANK: int
NO_RANK: int
"""The holders of a whole tensor that every rank gets, or none."""

class FullTensorBucket:
    """DTensors of any meshes whose wholes every rank gets, or one rank: moved together, taken one by one."""

    def __init__(self) -> None: ...
    def add(self, dtensor: Any, holder: int, dtype: torch.dtype | None, most: int) -> int:
        """``holder``: the number of a rank in the mesh, the last axis first, ``EVERY_RANK`` or ``NO_RANK``.
        Returns the bytes that the bucket holds for the tensor, or -1, with nothing done, if they are more
        than ``most``."""

    def start(self) -> None: ...
    def take(self) -> Tensor | None:
        """The next whole; ``None`` on a rank that does not get it."""

def move_to_owners(
    dtensors: list[Any], owners: list[int], async_op: bool, max_bytes: int | None
) -> list[Tensor | None]:
    """The whole of each DTensor if this rank, by its number in the mesh, is its owner."""

def move_from_owners(
    wholes: list[Tensor | None],
    specs: list[Any],
    owners: list[int],
    placements: Sequence[tuple[Placement, ...] | None],
    async_op: bool,
    max_bytes: int | None,
) -> list[Any]:
    """DTensors of ``placements``, by default the specs' own, from wholes on their owners."""
