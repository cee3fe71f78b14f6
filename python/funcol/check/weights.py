"""The reference's weights in the model of a parallel run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..redistribution.functions import redistribute
from .recording import plain_name


class Loader:
    """Gives parameters and buffers their part of ``weights``, by name, with no communication: stages of a
    pipeline come here at different times.

    DTensors get their shards, and plain tensors what ``declared`` says. One that is smaller in one dim and
    not declared gets the block of this rank on an axis that cuts the dim to this size, or is left alone if
    the program has cut it itself. Which one is a guess: equal seeds draw the first block on all ranks. So
    there are two to try: the last axis, with the first block taken for drawn, and the first axis, with it
    taken for cut. ``is_guessed`` is true if they differ.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        mesh: DeviceMesh,
        declared: Mapping[str, Sequence[str]],
        guess: int,
    ) -> None:
        self.is_guessed = False
        self._weights = weights
        self._mesh = mesh
        self._declared = declared
        self._guess = guess

    @torch.no_grad()
    def load(self, root: nn.Module) -> None:
        for name, held in (*root.named_parameters(), *root.named_buffers()):
            full = self._weights.get(plain_name(name))
            if full is None:
                continue
            local = held.to_local() if isinstance(held, DTensor) else held
            full = full.to(local.device, local.dtype)
            mesh = held.device_mesh if isinstance(held, DTensor) else self._mesh
            placements = self._placements(plain_name(name), held, full)
            if placements is not None:
                whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
                part = redistribute(whole, placements=placements).to_local()
                if part.shape == local.shape:
                    local.copy_(part)

    def _placements(self, name: str, held: Tensor, full: Tensor) -> Sequence[Placement] | None:
        """The placements that ``held`` should have, or None if it should keep its values."""
        if isinstance(held, DTensor):
            return held.placements
        placements: list[Placement] = [Replicate()] * self._mesh.ndim
        if name in self._declared:
            ops = self._declared[name]
            return [Shard(int(op[1:])) if op.startswith("S") else Replicate() for op in ops]
        if held.shape == full.shape:
            return placements
        cut = [
            dim for dim in range(full.ndim) if held.ndim == full.ndim and held.shape[dim] != full.shape[dim]
        ]
        if len(cut) != 1 or held.shape[cut[0]] > full.shape[cut[0]]:
            return None
        [dim] = cut
        guesses = [axis for axis in range(self._mesh.ndim) if self._block(full, dim, axis) == held.shape[dim]]
        is_first = torch.equal(held, full.narrow(dim, 0, held.shape[dim]))
        is_own = bool(torch.isin(_digests(held, dim), _digests(full, dim)).all())
        self.is_guessed |= bool(guesses) and (is_first or (not is_own and len(guesses) > 1))
        if not guesses or (is_own and not (is_first and self._guess == 0)):
            return None
        placements[guesses[-1] if self._guess == 0 else guesses[0]] = Shard(dim)
        return placements

    def _block(self, full: Tensor, dim: int, axis: int) -> int:
        """The size of this rank's block of ``dim`` along the axis."""
        blocks, rank = full.chunk(self._mesh.size(axis), dim), self._mesh.get_local_rank(axis)
        return blocks[rank].shape[dim] if rank < len(blocks) else 0


def _digests(tensor: Tensor, dim: int) -> Tensor:
    """A number for each index of ``dim``, equal for equal slices."""
    rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).double()
    generator = torch.Generator().manual_seed(0)
    factors = torch.rand(rows.shape[1], generator=generator, dtype=torch.float64, device="cpu")
    return (rows * factors.to(rows.device)).sum(1)
