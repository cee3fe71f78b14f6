"""Repeated moves of a trainer's weights to the layouts of an engine; messages are planned once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..redistribution.agreement import (
    Agreement,
    Manifest,
    MeshValue,
    compare,
    device_for,
    sets_that_agree,
)
from ..redistribution.planning import dtype_of
from .export import ByName, by_name, check_bytes
from .messages import Batch, LocalPart, MeshLayout, held_indices, transfer_of

Weights = nn.Module | Mapping[str, Tensor] | None


class WeightSync:
    """Moves the weights of ``source`` into those of ``destination``: from a trainer to an engine whose
    meshes, ranks, layouts, dtypes and names are its own.

    The constructor plans the messages; every :meth:`sync` sends them: each element once to each rank that
    wants it and does not have it, straight from shard to shard. No rank makes a full tensor::

        sync = funcol.WeightSync(trainer_model, engine_model, names={"lm_head": "head.weight"})
        for step in range(num_steps):
            train(step)
            sync()

    All ranks of ``group`` (default: the world) must make the same calls, of the constructor and of
    :meth:`sync`. Each passes what it has: a module or a mapping of names to DTensors and plain tensors,
    ``None`` for a side that it is not part of. A rank may have one side, both or none. A plain tensor is a
    replica. If ranks have a name on meshes of their own, as the replicas of an engine do, each mesh gets the
    tensor. The tensors are those of the module or mapping at construction, and are written in place; make
    another ``WeightSync`` if they are replaced.

    ``names``: a mapping or function from names of the destination to those of the source. A name that a
    mapping lacks is kept, and a name mapped to ``None`` is left out, as are tensors of the source to which no
    name is mapped. Parts of a fused tensor of the destination are given as views of it. ``dtype``: the dtype
    in which floating-point tensors travel, or a mapping or function from names of the source to it (default:
    the smaller dtype of both ends). Senders cast. ``max_bytes`` bounds the bytes that a rank sends and
    receives at once, except for a tensor that has more.

    ``changed_only``: only blocks of 1 KiB whose bytes changed since the last call are sent; receivers keep
    the rest. Senders keep a digest of 8 bytes for each block. The first call, and a call after a failed one,
    sends all blocks.

    Raises ``ValueError`` on all ranks, before the first byte is sent, if ranks of a mesh differ in names,
    shapes, dtypes, placements or meshes, if any ranks differ in options, or if a name is missing in the
    source, has another shape there, or is partial. Raises ``RuntimeError`` if another rank failed, with its
    reason, and ``TypeError`` if a value is not a tensor.
    """

    _op = "WeightSync"  # in errors

    def __init__(
        self,
        source: Weights,
        destination: Weights,
        *,
        names: ByName[str | None] | None = None,
        dtype: ByName[torch.dtype | None] | torch.dtype | None = None,
        max_bytes: int = 256 << 20,
        group: dist.ProcessGroup | None = None,
        changed_only: bool = False,
    ) -> None:
        self._group = group
        with Agreement(self._op, group) as agreement:
            check_bytes(self._op, "max_bytes", max_bytes)
            options = {"max_bytes": max_bytes, "changed_only": changed_only}
            sides = _tensors_of_side(source, self._op), _tensors_of_side(destination, self._op)
            plan = _SyncPlan(agreement, options, *sides, names, dtype)
            device = device_for(plan.devices, agreement.group)
            self._batches = plan.batches(max_bytes)
            for batch in self._batches:
                batch.finish(agreement.ranks, device, changed_only)
            agreement.end()

    def __call__(self) -> int:
        return self.sync()

    def sync(self) -> int:
        """Moves the weights as they are now. Returns the bytes of weights that this rank has sent to others.

        All ranks must call it. Raises ``RuntimeError`` if another rank failed, which the message names. Parts
        of the destination then have new values, and the next call sends all blocks.
        """
        num_sent = 0
        with torch.inference_mode(mode=False), torch.no_grad(), Agreement(self._op, self._group) as agreement:
            try:
                for batch in self._batches:
                    batch.pack()
                    agreement.meet_for_bucket()
                    num_sent += batch.send(agreement)
                    batch.unpack()
                    agreement.num_done += batch.num_tensors
                agreement.end()
            except BaseException:
                for batch in self._batches:
                    batch.forget()
                raise
        return num_sent


def _tensors_of_side(side: Weights, op: str) -> dict[str, Tensor]:
    if isinstance(side, nn.Module):
        found = side.state_dict(keep_vars=True)
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if side is not None and not isinstance(side, Mapping):
        raise TypeError(f"funcol::{op}: got a {type(side).__name__}, expected a module, a mapping or None.")
    for name, value in (side or {}).items():
        if not isinstance(value, Tensor):
            raise TypeError(f"funcol::{op}: '{name}' is a {type(value).__name__}, expected a tensor.")
    return dict(side or {})


class _SyncPlan:
    """The tensors of both sides as all ranks have them, by value."""

    def __init__(
        self,
        agreement: Agreement,
        options: dict[str, Any],
        source: dict[str, Tensor],
        destination: dict[str, Tensor],
        names: ByName[str | None] | None,
        dtype: ByName[torch.dtype | None] | torch.dtype | None,
    ) -> None:
        self._agreement = agreement
        self._op = agreement.op
        renamed = {name: by_name(names, name, name) for name in destination}
        for name, found in renamed.items():
            if found is not None and not isinstance(found, str):
                raise TypeError(
                    f"funcol::{self._op}: names has a {type(found).__name__} for '{name}', expected a name "
                    "or None. Pass the parts of a fused tensor as views of it."
                )
        self._source = source
        self._destination = {name: one for name, one in destination.items() if renamed[name] is not None}
        manifests = Manifest({}), Manifest({})
        for name, tensor in source.items():
            chosen = dtype if isinstance(dtype, torch.dtype | None) else by_name(dtype, name, None)
            manifests[0].add(name, tensor, chosen if tensor.is_floating_point() else None)
        for name, tensor in self._destination.items():
            manifests[1].add(name, tensor)
        for manifest in manifests:
            self._agreement.check_inside(manifest)
        by_rank = self._agreement.exchange(
            [{"function": self._op, **options}, renamed, *(one.values() for one in manifests)]
        )
        compare({rank: Manifest(one[0]) for rank, one in by_rank.items()}, self._op)
        self._renamed: dict[str, str] = {}
        for rank, (_, of_rank, *_) in by_rank.items():
            for name, theirs in of_rank.items():
                if theirs is not None and self._renamed.setdefault(name, theirs) != theirs:
                    raise ValueError(
                        f"funcol::{self._op}: names has '{theirs}' for '{name}' on rank {rank}, and "
                        f"'{self._renamed[name]}' on others. Pass the same names on every rank."
                    )
        self.devices: set[str] = set()
        self._sources, self._targets = (
            self._table({rank: Manifest.of(one[side]) for rank, one in by_rank.items()}) for side in (2, 3)
        )
        self._check()

    def _table(self, manifests: dict[int, Manifest]) -> dict[str, tuple[_ShapeAndDtypes, list[MeshLayout]]]:
        """Returns, by name, the tensor and the meshes that have it."""
        for part in sets_that_agree(manifests):
            compare({rank: manifests[rank] for rank in part}, self._op)
        found: dict[str, tuple[_ShapeAndDtypes, list[MeshLayout]]] = {}
        for rank, manifest in manifests.items():
            for index, entry in enumerate(manifest.entries):
                mesh = manifest.mesh_of(index) or MeshValue((rank,), (1,))
                layout = MeshLayout(mesh.ranks, mesh.shape, entry.placements or "R", entry.order)
                kind = _ShapeAndDtypes(entry.shape, entry.dtype, entry.sent_as)
                known, layouts = found.setdefault(entry.name, (kind, []))
                if known != kind:
                    raise ValueError(
                        f"funcol::{self._op}: '{entry.name}' is {kind} on rank {rank}, and {known} on "
                        "others. Pass tensors of one shape and dtype on all ranks of a side."
                    )
                if layout not in layouts:
                    layouts.append(layout)
                self.devices |= {entry.device} - {""}
        return found

    def _check(self) -> None:
        """Raises the same error on all ranks if something cannot be moved."""
        missing = [name for name in self._targets if self._renamed[name] not in self._sources]
        if missing:
            listed = ", ".join(f"'{self._renamed[name]}'" for name in missing[:10])
            raise ValueError(
                f"funcol::{self._op}: {listed} of the destination is missing in the source. Pass it there, "
                "or names that map it to a name of the source or to None."
            )
        for name, (kind, layouts) in self._targets.items():
            theirs, sources = self._sources[self._renamed[name]]
            if kind.shape != theirs.shape:
                raise ValueError(
                    f"funcol::{self._op}: '{name}' has shape {kind.shape}, in the source {theirs.shape}. "
                    "Pass tensors of one shape; parts of a fused tensor are views of it."
                )
            for layout in (*sources, *layouts):
                if "Partial" in layout.placements:
                    raise ValueError(
                        f"funcol::{self._op}: '{name}' has the placements {layout.placements}. Reduce it "
                        "first."
                    )

    def batches(self, max_bytes: int) -> list[Batch]:
        """Returns the same batches on every rank, with the messages of this rank."""
        rank = self._agreement.own_rank
        batches: list[Batch] = []
        last: dict[torch.dtype, Batch] = {}
        for name, (kind, layouts) in self._targets.items():
            theirs = self._renamed[name]
            of_source, sources = self._sources[theirs]
            dtype = of_source.sent_to(kind)
            for number, dst in enumerate(layouts):
                # Ranks that have both sides send the least; else the source's replicas take turns.
                src = max(
                    (sources[(number + turn) % len(sources)] for turn in range(len(sources))),
                    key=lambda one: len({*one.ranks} & {*dst.ranks}),
                )
                transfer = transfer_of(src, dst, kind.shape, dtype)
                largest = held_indices(dst, kind.shape, dtype, dst.ranks[0])
                shape = [sum(size for _, size in intervals) for intervals in largest]
                cost = transfer.busiest_sender + math.prod(shape) * dtype.itemsize
                batch = last.get(dtype)
                if batch is None or batch.cost + cost > max_bytes:
                    batch = last[dtype] = Batch(dtype)
                    batches.append(batch)
                batch.cost += cost
                batch.num_tensors += 1
                batch.add(
                    transfer,
                    rank,
                    LocalPart(self._op, theirs, self._source[theirs], src, rank)
                    if rank in src.ranks
                    else None,
                    LocalPart(self._op, name, self._destination[name], dst, rank)
                    if rank in dst.ranks
                    else None,
                )
        return batches


class _ShapeAndDtypes(NamedTuple):
    """Shape and dtypes of a tensor, which the ranks of a side have in common."""

    shape: tuple[int, ...]
    dtype: str
    sent_as: str

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    def sent_to(self, other: _ShapeAndDtypes) -> torch.dtype:
        if self.sent_as != "none":
            return dtype_of(self.sent_as)
        return min(dtype_of(other.dtype), dtype_of(self.dtype), key=lambda one: one.itemsize)
