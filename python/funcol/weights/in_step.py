"""Whether ranks go through the same buckets: what each says before it sends one, and when it leaves.

Before a bucket, and at the end, the ranks of each of its meshes compare what comes next: one small
all_reduce for each mesh. A rank that leaves before its end takes part in the next one, and says so. So
nobody waits for a rank that has gone, and nothing is sent unless all ranks have come to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from ..collectives.groups import group_named, mesh_group_name
from ..redistribution.meshes import merged_groups

_END = 0
_LARGEST = 2**62


class InStep:
    """The ranks of a call of ``op``."""

    def __init__(self, op: str, meshes: Iterable[DeviceMesh] = ()) -> None:
        """``meshes`` whose ranks learn of a leaving rank from the start; others do from their first bucket
        on."""
        self._op = op
        # In the order in which they came. Equal meshes are one: ranks may hold several objects of it.
        self._meshes: dict[DeviceMesh, _MeshRanks] = {}
        for mesh in meshes:
            self._ranks_of(mesh)
        self._has_ended = False

    def go_on(self, meshes: Iterable[DeviceMesh], content: int, num_done: int, next_name: str) -> None:
        """Returns once all ranks of ``meshes`` are about to send a bucket of the same ``content``, a number
        above 0. Raises on all of them if they are not."""
        for mesh in meshes:
            ranks = self._ranks_of(mesh)
            self._compare(ranks, content, num_done, f"has '{next_name}' next")

    def end(self, num_done: int) -> None:
        """Returns once all ranks of the meshes so far have come to their end; raises if one has not."""
        for ranks in self._meshes.values():
            self._compare(ranks, _END, num_done, "has no further tensor")
        self._has_ended = True

    def leave(self, num_done: int) -> None:
        """Says to all ranks that have not heard of it that somebody has left before the end: this rank,
        unless it goes because of another one."""
        if self._has_ended or not dist.is_initialized():
            return
        self._has_ended = True
        knows = [ranks.left for ranks in self._meshes.values() if ranks.left]
        code = max(knows, default=_code(dist.get_rank(), num_done) if self._meshes else 0)
        for ranks in self._meshes.values():
            if not ranks.is_told:
                with contextlib.suppress(RuntimeError):  # nobody is there, and this rank goes anyway
                    ranks.agree(_END, code)

    def _ranks_of(self, mesh: DeviceMesh) -> _MeshRanks:
        ranks = self._meshes.get(mesh)
        if ranks is None:
            ranks = self._meshes[mesh] = _MeshRanks(mesh)
        return ranks

    def _compare(self, ranks: _MeshRanks, content: int, num_done: int, what: str) -> None:
        low, high = ranks.agree(content, 0)
        if ranks.left:
            rank, num_taken = ranks.left % 2**31 - 1, ranks.left // 2**31
            raise RuntimeError(
                f"funcol::{self._op}: rank {rank} left after {num_taken} tensors, by an error there or, in a "
                "loop, a break; see its output. Take all tensors on every rank, or leave on all alike."
            )
        if low != high:
            raise ValueError(
                f"funcol::{self._op}: the ranks go through different tensors. After {num_done} of them, rank "
                f"{dist.get_rank()} {what}, and another one has something else. Pass the same names and "
                "shapes in the same order, and the same options, on every rank."
            )


class _MeshRanks:
    """The ranks of a mesh, which compare numbers."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.left = 0  # the code of a rank that has left, once it is known
        self.is_told = False  # all ranks know that somebody left, or that they disagree
        self._device = mesh.device_type
        with _disable_current_modes():
            is_inside = mesh.get_coordinate() is not None
        self._groups = _groups_of(mesh) if is_inside else []

    def agree(self, content: int, left: int) -> tuple[int, int]:
        """The lowest and the highest ``content`` of all ranks."""
        if not self._groups:
            return content, content
        with _disable_current_modes():
            numbers = torch.tensor([content, -content, left], dtype=torch.int64, device=self._device)
            for group in self._groups:
                dist.all_reduce(numbers, dist.ReduceOp.MAX, group)
            high, low, self.left = numbers.tolist()
        self.is_told = self.left != 0 or high != -low
        return -low, high


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Groups over which one all_reduce after the other reaches all ranks of ``mesh``."""
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    together = merged_groups(mesh).get(sum(1 << axis for axis in axes))
    if together is not None:
        return [group_named(together)]
    return [group_named(mesh_group_name(mesh, axis)) for axis in axes]


def _code(rank: int, num_done: int) -> int:
    """A number above 0 for a rank that left after ``num_done`` tensors."""
    return num_done * 2**31 + rank + 1


def number_of(content: int) -> int:
    """``content`` as a number that :meth:`InStep.go_on` takes."""
    return content % (_LARGEST - 1) + 1
