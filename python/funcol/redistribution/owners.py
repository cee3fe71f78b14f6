"""Full tensors on owners: each tensor on one rank, as optimizers on full matrices need them.

PyTorch has no counterpart. The assignment is the rule of longest processing time first (R. L. Graham, Bounds
on multiprocessing timing anomalies, 1969).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def assign_owners(
    shapes: Iterable[Sequence[int]],
    num_ranks: int,
    *,
    cost: Callable[[Sequence[int]], float] = math.prod,
) -> list[int]:
    """Returns a rank below ``num_ranks`` for each of ``shapes``, so that the ranks' costs are balanced.

    ``cost`` returns what a tensor of a shape costs its owner (default: the number of its elements). The most
    expensive tensors are assigned first, each to the rank with the lowest cost so far, so that the highest
    cost of a rank is at most 4/3 - 1/(3 ``num_ranks``) times that of the best assignment. The same arguments
    give the same owners on every rank. Raises ``ValueError`` if there are no ranks, or if a cost is negative,
    infinite or NaN.
    """
    if num_ranks < 1:
        raise ValueError(f"funcol::assign_owners: num_ranks is {num_ranks}, expected 1 or more.")
    costs = [cost(shape) for shape in shapes]
    for index, one in enumerate(costs):
        if not one >= 0 or one == math.inf:
            raise ValueError(
                f"funcol::assign_owners: the cost of tensor {index} is {one}, expected a number of 0 or more."
            )
    ranks = [(0.0, rank) for rank in range(num_ranks)]  # a heap: the least busy one first
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        busy, rank = ranks[0]
        owners[index] = rank
        heapq.heapreplace(ranks, (busy + costs[index], rank))
    return owners


@dataclass(frozen=True)
class Owned:
    """The layout of a tensor that rank ``rank`` of its mesh holds in full, and the other ranks not at all.

    Ranks count up along the last axis of the mesh first.
    """

    rank: int


@dataclass(frozen=True)
class OwnedTensor:
    """A tensor under :class:`Owned` on one rank, as :func:`funcol.redistribute_many` returns and takes it.

    ``whole`` is the full tensor on its owner, ``None`` on other ranks.
    """

    owner: int
    whole: Tensor | None
    spec: DTensorSpec
    """Of the tensor before it moved to its owner."""
    token: Tensor | None = None
    """An empty tensor by which all ranks take part in a backward pass; ``None`` without gradients."""

    @property
    def shape(self) -> torch.Size:
        return self.spec.shape

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.spec.mesh

    def with_whole(self, whole: Tensor | None) -> OwnedTensor:
        """Returns a copy with another ``whole`` of the same shape and dtype; ``None`` except on the owner."""
        return replace(self, whole=whole)
