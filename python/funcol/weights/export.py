"""Whole tensors of a model, one after the other, moved many at a time."""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .. import _C
from .._progress import Progress
from ..redistribution.functions import redistribute
from ..redistribution.meshes import root_mesh, simulates_ranks
from ..redistribution.moving import settled
from .in_step import InStep, number_of

_OP = "full_tensors"
_NO_BOUND = 2**62


def full_tensors(
    named: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    to: int | None = None,
    bucket_bytes: int = 256 << 20,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Iterator[tuple[str, Tensor | None]]:
    """Yields ``(name, whole tensor)`` for each of ``named``, in order: what ``full_tensor()`` gives for each
    DTensor, by a few large collectives.

    ``named`` is a module (its ``state_dict()``), a mapping, or an iterable of pairs; DTensors of any meshes,
    placements and shard orders, parameters and plain tensors mix. All ranks call it alike and go through the
    whole loop::

        for name, weight in funcol.full_tensors(model, to=0, dtype=torch.bfloat16):
            if weight is not None:  # on rank 0
                engine.load(name, weight)

    Consecutive tensors of ``bucket_bytes`` go together, by one collective for each kind of move (dtype, mesh,
    the axes that cut). The next bucket is on its way while this one is used. At most two buckets, and the
    tensor that was yielded last, are in memory beside the shards; a tensor larger than ``bucket_bytes`` is a
    bucket of its own. A bucket is what its tensors take in buffers, gloo's own on the CPU included.

    ``to``: the global rank that gets the tensors. The others send their shards, and get ``(name, None)``;
    together they send as much as a gather does. A tensor on a submesh comes from that of ``to``: the other
    ones hold replicas. Without ``to`` every rank gets them, and ``None`` for tensors on meshes that it is
    not part of. ``dtype``: that of the results, for tensors of floating-point numbers; they are sent so if
    that is smaller. ``device``: where the results are put.

    Results have memory of their own and need no gradient; but plain and replicated tensors are yielded as
    they are, in the model's memory, if neither ``dtype`` nor ``device`` changes them. Tied tensors of a
    module, a mapping or a list are sent once and yielded as one tensor, which is kept meanwhile. An iterator
    is read as it goes, and tied tensors of it are sent each time.

    ``progress``: rank ``to``, or rank 0, shows on its terminal how many tensors are done and how long the
    rest takes.

    Errors come before the bucket is sent. ``ValueError``: ``to`` is no rank of a tensor's mesh, or the ranks
    have different names or shapes. ``RuntimeError``, on the other ranks: a rank left the loop early; they
    learn of it when they come to the next bucket. A rank that leaves waits for them until then.

    PyTorch counterpart: ``DTensor.full_tensor``, in a loop.
    """
    if bucket_bytes < 1:
        raise ValueError(f"funcol::{_OP}: bucket_bytes is {bucket_bytes}, expected a number of 1 or more.")
    if to is not None and (not isinstance(to, int) or to < 0):
        raise ValueError(f"funcol::{_OP}: to is {to!r}, expected a global rank, or None for all ranks.")
    if isinstance(named, nn.Module):
        named = {name: value for name, value in named.state_dict().items() if isinstance(value, Tensor)}
    pairs: Any = named.items() if isinstance(named, Mapping) else named
    how = _How(to, bucket_bytes, dtype, None if device is None else torch.device(device))
    return _stream(_Source(pairs), how, _Counter(pairs, to, progress))


class _How:
    """The options of an export, and where its results go."""

    def __init__(
        self, to: int | None, bucket_bytes: int, dtype: torch.dtype | None, device: torch.device | None
    ) -> None:
        self.to = to
        self.bucket_bytes = bucket_bytes
        self.dtype = dtype
        self.device = device
        self.is_receiver = to is None or to == (dist.get_rank() if dist.is_initialized() else 0)
        self._holders: dict[DeviceMesh, int] = {}  # equal meshes are one

    def holder(self, mesh: DeviceMesh, name: str) -> int:
        """The rank of ``mesh`` that gets the whole tensor, as C++ counts it."""
        known = self._holders.get(mesh)
        if known is None:
            known = self._holders[mesh] = self._find_holder(mesh, name)
        return known

    def _find_holder(self, mesh: DeviceMesh, name: str) -> int:
        if self.to is None:
            return _C.EVERY_RANK
        ranks = mesh.mesh.flatten().tolist()
        if self.to not in ranks:
            if root_mesh(mesh) is not mesh and self.to in root_mesh(mesh).mesh.flatten().tolist():
                return _C.NO_RANK  # it has a replica, on a submesh of its own
            raise ValueError(
                f"funcol::{_OP}: '{name}' is on {mesh}, which rank {self.to} is not part of. Pass a rank of "
                "every tensor's mesh as to."
            )
        return ranks.index(self.to)

    def finished(self, whole: Tensor) -> Tensor:
        """``whole`` with dtype and device as wanted."""
        dtype = self.dtype if self.dtype is not None and whole.is_floating_point() else whole.dtype
        if whole.dtype == dtype and self.device is None:
            return whole
        return whole.to(device=self.device or whole.device, dtype=dtype)


class _Source:
    """The tensors to be exported, with one that was read too early."""

    def __init__(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self._same = tied(pairs) if isinstance(pairs, Collection) else {}
        self._pairs = iter(pairs)
        self._next: tuple[int, str, Tensor] | None = None
        self._num_read = 0

    def read(self) -> tuple[int, str, Tensor] | None:
        """Index, name and tensor; None at the end."""
        if self._next is not None:
            found, self._next = self._next, None
            return found
        pair = next(self._pairs, None)
        if pair is None:
            return None
        self._num_read += 1
        name, tensor = pair
        if not isinstance(tensor, Tensor):
            raise TypeError(f"funcol::{_OP}: '{name}' is a {type(tensor).__name__}, expected a tensor.")
        return self._num_read - 1, name, tensor

    def put_back(self, entry: tuple[int, str, Tensor]) -> None:
        self._next = entry

    def first_of(self, index: int) -> int:
        """The index of the first tensor that is tied to this one: its own if there is none."""
        return self._same.get(index, (index, index))[0]

    def last_of(self, index: int) -> int:
        return self._same.get(index, (index, index))[1]


def tied(pairs: Iterable[tuple[str, Tensor]]) -> dict[int, tuple[int, int]]:
    """The first and the last index of the same tensor, by the index of each that is there several times."""
    by_storage: dict[int, list[tuple[int, DTensor]]] = {}
    for index, (_, tensor) in enumerate(pairs):
        if isinstance(tensor, DTensor):
            storage = settled(tensor._local_tensor).untyped_storage()._cdata
            by_storage.setdefault(storage, []).append((index, tensor))
    same: dict[Any, list[int]] = {}
    for sharing in by_storage.values():
        for index, tensor in sharing if len(sharing) > 1 else ():
            local = tensor._local_tensor
            view = local.storage_offset(), local.stride(), tensor.shape, tensor._spec.placements
            same.setdefault((local.untyped_storage()._cdata, view), []).append(index)
    return {index: (one[0], one[-1]) for one in same.values() if len(one) > 1 for index in one}


class _Bucket:
    """Consecutive tensors that are moved together."""

    def __init__(self, source: _Source, how: _How) -> None:
        self.meshes: dict[DeviceMesh, None] = {}  # in the order in which they came
        self.content = 1
        self._how = how
        self._source = source
        self._moves = _C.WholeBucket()
        # Index, name, and a tensor that does not move, a DTensor that moves alone, or None for the next move.
        self._entries: list[tuple[int, str, Tensor | None]] = []
        self._fill()

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def first_name(self) -> str:
        return self._entries[0][1]

    def _fill(self) -> None:
        how, source, add = self._how, self._source, self._entries.append
        names, numbers = [], []
        left, most = how.bucket_bytes, _NO_BOUND
        while (entry := source.read()) is not None:
            index, name, tensor = entry
            if not isinstance(tensor, DTensor):
                used = tensor.numel() * tensor.element_size()
                moved: Tensor | None = tensor
            elif source.first_of(index) != index:
                used, moved = 0, None
            else:
                mesh = tensor.device_mesh
                self.meshes[mesh] = None
                try:
                    used = self._moves.add(tensor, how.holder(mesh, name), how.dtype, most)
                    moved = None
                except NotImplementedError:
                    used, moved = tensor.numel() * tensor.element_size(), tensor
            if used < 0 or used > most:
                source.put_back(entry)
                break
            add((index, name, moved))
            names.append(name)
            numbers.append(hash(tensor.shape))
            left -= used
            most = max(left, 0)
            if left <= 0:
                break
        self.content = number_of(zlib.crc32("\n".join(names).encode()) ^ hash(tuple(numbers)))

    def start(self) -> None:
        self._moves.start()
        for place, (index, name, tensor) in enumerate(self._entries):
            if isinstance(tensor, DTensor):
                self._entries[place] = index, name, _moved_alone(tensor)

    def wholes(self, kept: dict[int, Tensor | None]) -> Iterator[tuple[str, Tensor | None]]:
        """Yields names and wholes. ``kept`` are those that come again."""
        how, source, take = self._how, self._source, self._moves.take
        changes = how.dtype is not None or how.device is not None
        self._entries.reverse()
        while self._entries:
            index, name, whole = self._entries.pop()
            first = source.first_of(index)
            if first != index:
                whole = kept[first] if source.last_of(index) != index else kept.pop(first)
            else:
                if whole is None:
                    whole = take()
                elif not how.is_receiver:
                    whole = None
                elif whole.requires_grad:
                    whole = whole.detach()
                if changes and whole is not None:
                    whole = how.finished(whole)
                if source.last_of(index) != index:
                    kept[index] = whole
            yield name, whole
            del whole


@torch.no_grad()
def _moved_alone(tensor: DTensor) -> Tensor:
    """The whole of a tensor that C++ does not move with others."""
    return settled(redistribute(tensor, placements=[Replicate()] * tensor.device_mesh.ndim)._local_tensor)


def _stream(source: _Source, how: _How, counter: _Counter) -> Iterator[tuple[str, Tensor | None]]:
    in_step = InStep(_OP)
    is_checked = not simulates_ranks()
    kept: dict[int, Tensor | None] = {}
    num_done = 0

    def next_bucket() -> _Bucket:
        bucket = _Bucket(source, how)
        if bucket and is_checked:
            in_step.go_on(bucket.meshes, bucket.content, num_done, bucket.first_name)
        if bucket:
            bucket.start()
        return bucket

    with counter:
        try:
            current = next_bucket()
            while current:
                following = next_bucket()
                if not following:
                    in_step.end(num_done)
                for pair in current.wholes(kept):
                    num_done += 1
                    counter.count(pair[1])
                    yield pair
                    del pair
                current = following
        finally:
            in_step.leave(num_done)


class _Counter:
    """Counts tensors on a terminal, on one rank."""

    def __init__(self, named: Any, to: int | None, is_on: bool) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        total = len(named) if isinstance(named, Collection) else None
        self._progress = Progress(_OP, total, is_on=is_on and rank == (to or 0))
        self._start = time.monotonic()
        self._num_bytes = 0

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def count(self, whole: Tensor | None) -> None:
        if not self._progress.is_shown:
            return
        if whole is not None:
            self._num_bytes += whole.numel() * whole.element_size()
        gib = self._num_bytes / 2**30
        self._progress.show(f"{gib:.2f} GiB, {gib / max(time.monotonic() - self._start, 1e-9):.2f} GiB/s")
        self._progress.advance()
