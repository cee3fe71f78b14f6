"""Full tensors of a model, one after the other, moved many at a time."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Self, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from .. import _C
from .._progress import Progress
from ..redistribution.agreement import (
    Agreement,
    Manifest,
    agreed_ties,
    mesh_value,
    own_ties,
    reason_of,
    staging_device,
)
from ..redistribution.functions import redistribute
from ..redistribution.local_redistribute import make_dtensor, settled
from .fusing import Cat, NameOrParts, Stack

_OP = "full_tensors"
_NO_BOUND = 2**62

_T = TypeVar("_T")
ByName: TypeAlias = Mapping[str, _T] | Callable[[str], _T]
"""A value for each name."""


def by_name(values: ByName[_T] | None, name: str, default: Any) -> _T:
    """Returns the value for ``name``; ``default`` if there are no values, or if a mapping lacks it."""
    if values is None:
        return default  # type: ignore[no-any-return]
    return values.get(name, default) if isinstance(values, Mapping) else values(name)


def check_bytes(op: str, name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"funcol::{op}: {name} is {count}, expected a number of 1 or more.")


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def local_of(tensor: Tensor) -> Tensor:
    return settled(tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def full_tensors(
    named: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    *,
    to: int | None = None,
    bucket_bytes: int = 256 << 20,
    dtype: ByName[torch.dtype | None] | torch.dtype | None = None,
    device: torch.device | str | None = None,
    names: ByName[NameOrParts | None] | None = None,
    group: dist.ProcessGroup | None = None,
    progress: bool = False,
) -> FullTensors:
    """Yields ``(name, full tensor)`` for each of ``named``, in order: the ``full_tensor()`` of each DTensor,
    by a few large collectives.

    ``named`` is a module (its ``state_dict()``), a mapping, or an iterable of pairs; DTensors of any meshes,
    placements and shard orders, parameters and plain tensors may be mixed. All ranks of ``group`` (default:
    the world) must make the same call and go through the full loop::

        with funcol.full_tensors(model, to=0, dtype=torch.bfloat16) as weights:
            for name, weight in weights:
                if weight is not None:  # on rank 0
                    engine.load(name, weight)

    A loop that may be left early has to be in a ``with`` block, or to be followed by ``close()``, so that the
    other ranks are notified; nothing is sent when the stream is garbage-collected.

    Consecutive tensors of ``bucket_bytes`` go together, by one collective for each kind of move (dtype, mesh,
    the axes that cut). The next bucket is in flight while this one is used. At most two buckets, and the
    tensor that was yielded last, are in memory beside the shards; a tensor larger than ``bucket_bytes`` is a
    bucket of its own. Buckets count what tensors take in buffers, including gloo's own on the CPU.

    ``to``: the global rank that gets the tensors. The others send their shards, and get ``(name, None)``;
    together they send as much as a gather does. If a tensor is on several submeshes, that with rank ``to``
    sends it: the others hold replicas. Without ``to`` every rank gets the tensors, and ``None`` for those on
    meshes that it is not part of. ``names``: a mapping or function from names of the model to those that are
    yielded. A name mapped to ``None`` is left out, and a name that a mapping lacks is kept. A
    :class:`funcol.weights.Cat` or :class:`~funcol.weights.Stack` yields the parts of a tensor, as views.
    ``dtype``: the dtype of the results, for floating-point tensors, or a mapping or function from yielded
    names to it (for parts, the name of the first); tensors are sent in it if it is smaller than their own.
    ``device``: the device of the results.

    Results have memory of their own and require no gradient; but plain and replicated tensors are yielded as
    they are, in the model's memory, if neither ``dtype`` nor ``device`` changes them. Tied tensors of a
    module, a mapping or a list are sent once and yielded as one tensor, which is kept until its last use. An
    iterator is read lazily, and its tied tensors are sent each time.

    ``progress``: rank ``to``, or rank 0, shows on its terminal how many tensors are done and how long the
    rest takes.

    Before the first byte is sent, or before each bucket of an iterator, the ranks compare names, shapes,
    dtypes, placements, meshes and options by value. Ranks that share no mesh, such as the stages of a
    pipeline, need not agree. Raises ``ValueError`` on all ranks if they differ, with the first difference and
    the ranks. Raises ``RuntimeError`` on the other ranks if a rank leaves, by an error or early, with its
    reason. A rank that leaves waits until the others have reached the next bucket.

    PyTorch counterpart: ``DTensor.full_tensor``, in a loop.
    """
    return FullTensors(named, _ExportOptions(to, bucket_bytes, dtype, device, names), group, progress)


class FullTensors(Iterator[tuple[str, "Tensor | None"]]):
    """The iterator of :func:`funcol.full_tensors`; as a context it ends the stream on all ranks."""

    def __init__(
        self, named: Any, options: _ExportOptions, group: dist.ProcessGroup | None, progress: bool
    ) -> None:
        self._named, self._options, self._group = named, options, group
        self._agreement: Agreement | None = None
        self._shows = progress
        self._steps = self._run()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[str, Tensor | None]:
        try:
            return next(self._steps)
        except StopIteration:
            raise
        except BaseException as error:
            self._leave(reason_of(error))
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, *rest: Any) -> None:
        self._leave("it left the loop" if error is None else reason_of(error))

    def close(self) -> None:
        """Ends the stream. The other ranks raise at their next bucket, unless this rank has all tensors."""
        self._leave("it closed the stream")

    def _leave(self, reason: str) -> None:
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.leave(reason)
        self._steps.close()

    def _run(self) -> Generator[tuple[str, Tensor | None]]:
        self._agreement = agreement = Agreement(_OP, self._group)
        self._options.check()
        source = _ExportSource(self._named, self._options, agreement)
        kept: dict[int, Tensor | None] = {}

        def next_bucket() -> _Bucket:
            bucket = _Bucket(source, self._options)
            if bucket:
                source.agree(bucket)
                bucket.start()
            else:
                source.end()
            return bucket

        is_shown = self._shows and own_rank() == (self._options.to or 0)
        start, num_bytes = time.monotonic(), 0
        with Progress(_OP, source.count, is_on=is_shown) as progress:
            current = next_bucket()
            while current:
                following = next_bucket()
                for name, full in current.results(kept):
                    agreement.num_done += 1
                    if progress.is_shown:
                        num_bytes += 0 if full is None else full.numel() * full.element_size()
                        gib, seconds = num_bytes / 2**30, max(time.monotonic() - start, 1e-9)
                        progress.show(f"{gib:.2f} GiB, {gib / seconds:.2f} GiB/s")
                        progress.advance()
                    yield from self._options.split(name, full)
                    del full
                current = following


@dataclass
class _ExportOptions:
    """The options of an export, and where its results go."""

    to: int | None
    bucket_bytes: int
    dtype: ByName[torch.dtype | None] | torch.dtype | None
    device: torch.device | str | None
    names: ByName[NameOrParts | None] | None

    def __post_init__(self) -> None:
        self._device = None if self.device is None else torch.device(self.device)
        self._fused: dict[str, Cat | Stack] = {}  # by the name of the first part
        self.is_receiver = self.to is None or self.to == own_rank()

    def check(self) -> None:
        check_bytes(_OP, "bucket_bytes", self.bucket_bytes)
        if self.to is not None and (not isinstance(self.to, int) or self.to < 0):
            raise ValueError(
                f"funcol::{_OP}: to is {self.to!r}, expected a global rank, or None for all ranks."
            )

    def manifest(self, from_iterator: bool) -> Manifest:
        """Returns a manifest without tensors, with the options that have to be equal on all ranks."""
        source = "an iterator" if from_iterator else "a module, a mapping or a list"
        return Manifest({"function": _OP, "source": source, "to": self.to, "bucket_bytes": self.bucket_bytes})

    def dtype_of(self, name: str, tensor: Tensor) -> torch.dtype | None:
        """Returns the dtype of the result; ``None`` for the tensor's own."""
        if self.dtype is None or not tensor.is_floating_point():
            return None
        return self.dtype if isinstance(self.dtype, torch.dtype) else by_name(self.dtype, name, None)

    def name_of(self, name: str, tensor: Tensor) -> str | None:
        """Returns the yielded name, or that of the first part; ``None`` for tensors that are left out."""
        found = by_name(self.names, name, name)
        if found is None or isinstance(found, str):
            return found
        found.split(torch.empty(tensor.shape, device="meta"))  # ValueError before anything is sent
        self._fused[found.parts[0]] = found
        return found.parts[0]

    def split(self, name: str, full: Tensor | None) -> list[tuple[str, Tensor | None]]:
        """Returns the pairs that a program gets for a tensor."""
        fused = self._fused.get(name)
        if fused is None:
            return [(name, full)]
        views = [None] * len(fused.parts) if full is None else fused.split(full)
        return [*zip(fused.parts, views, strict=True)]

    def converted(self, name: str, full: Tensor) -> Tensor:
        """Converts ``full`` to the dtype and device of the results."""
        dtype = self.dtype_of(name, full)
        if dtype is None and self._device is None:
            return full
        return full.to(device=self._device or full.device, dtype=dtype or full.dtype)


class _ExportSource:
    """The tensors to be exported, with one that was read too early, and what the ranks have agreed on."""

    def __init__(self, named: Any, options: _ExportOptions, agreement: Agreement) -> None:
        if isinstance(named, nn.Module):
            named = {name: value for name, value in named.state_dict().items() if isinstance(value, Tensor)}
        elif isinstance(named, FunctionType):  # calls a program's code, which may raise
            named = named()
        pairs: Any = named.items() if isinstance(named, Mapping) else named
        self.count = len(pairs) if isinstance(pairs, Collection) else None
        self._options = options
        self._agreement = agreement
        self._next: tuple[int, str, Tensor] | None = None
        self._num_read = 0
        self.is_cut_over_single_ranks = functools.cache(_is_cut_over_single_ranks)
        self._firsts: dict[int, int] = {}
        self._lasts: dict[int, int] = {}
        self._manifest: Manifest | None = None
        self._manifests: dict[int, Manifest] = {}
        pairs = self._named(pairs)
        if self.count is not None:
            pairs = [*pairs]
            self._manifest = manifest = options.manifest(from_iterator=False)
            for name, tensor in pairs:
                manifest.add(name, tensor, options.dtype_of(name, tensor))
            manifest.ties = own_ties(tensor for _, tensor in pairs)
            self._manifests = agreement.meet(manifest)
            self._firsts = agreed_ties(self._manifests)
            for index, first in sorted(self._firsts.items()):
                self._lasts[first] = index
        self._pairs = iter(pairs)  # not enumerate(), which would keep the pair that it gave last

    def _named(self, pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in pairs:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"funcol::{_OP}: '{name}' is a {type(tensor).__name__}, expected a tensor.")
            shown = self._options.name_of(name, tensor)
            if shown is not None:
                yield shown, tensor

    def read(self) -> tuple[int, str, Tensor] | None:
        """Returns the next index, name and tensor; None at the end."""
        entry, self._next = self._next, None
        if entry is None and (pair := next(self._pairs, None)) is not None:
            entry = self._num_read, *pair
            self._num_read += 1
        return entry

    def unread(self, entry: tuple[int, str, Tensor]) -> None:
        self._next = entry

    def agree(self, bucket: _Bucket) -> None:
        """Waits until all ranks are about to send ``bucket``."""
        if self._manifest is not None:
            self._agreement.meet_for_bucket()
            return
        manifest = self._options.manifest(from_iterator=True)
        for _, name, tensor in bucket.read:
            manifest.add(name, tensor, self._options.dtype_of(name, tensor))
        self._agreement.meet(manifest)

    def end(self) -> None:
        """Waits until all ranks have ended."""
        self._agreement.end(self._options.manifest(from_iterator=True) if self._manifest is None else None)

    def receiver(self, index: int, name: str, tensor: DTensor) -> int:
        """Returns the rank of the tensor's mesh that gets the full tensor, as C++ counts it."""
        to = self._options.to
        if to is None:
            return _C.EVERY_RANK
        ranks = mesh_value(tensor.device_mesh).ranks
        if to in ranks:
            return ranks.index(to)
        if to in self._manifests and to in (self._manifests[to].ranks_of(index) or ()):
            return _C.NO_RANK  # it has a replica, on a submesh of its own
        raise ValueError(
            f"funcol::{_OP}: '{name}' is on a mesh of the ranks {list(ranks)}, which rank {to} is not part "
            "of. Pass a rank of every tensor's mesh as to."
        )

    def first_of(self, index: int) -> int:
        """Returns the index of the first tensor that is tied to this one; its own if there is none."""
        return self._firsts.get(index, index)

    def last_of(self, index: int) -> int:
        return self._lasts.get(self.first_of(index), index)


def _is_cut_over_single_ranks(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> bool:
    """Returns true if the axes that cut a tensor have one rank each."""
    cut = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    return bool(cut) and all(mesh.size(axis) == 1 for axis in cut)


class _Bucket:
    """Consecutive tensors that are moved together."""

    def __init__(self, source: _ExportSource, options: _ExportOptions) -> None:
        self.read: list[tuple[int, str, Tensor]] = []
        self._options = options
        self._source = source
        self._moves = _C.FullTensorBucket()
        # Index, name, and a tensor that does not move, a DTensor that moves alone, or None for the next move.
        self._entries: list[tuple[int, str, Tensor | None]] = []
        self._uncut: set[int] = set()  # cut in name alone: the full tensor is the model's memory
        self._staged: dict[int, torch.device] = {}  # devices of shards that go through another one
        self._fill()

    def __bool__(self) -> bool:
        return bool(self._entries)

    def _fill(self) -> None:
        options, source, add = self._options, self._source, self._entries.append
        left, most = options.bucket_bytes, _NO_BOUND
        while (entry := source.read()) is not None:
            index, name, tensor = entry
            if not isinstance(tensor, DTensor):
                used = tensor.numel() * tensor.element_size()
                moved: Tensor | None = tensor
            elif source.first_of(index) != index:
                used, moved = 0, None
            else:
                staged = staging_device(tensor)
                if staged is not None:
                    self._staged[index] = tensor._local_tensor.device
                    local = settled(tensor._local_tensor).detach().to(staged)
                    tensor = make_dtensor(local, tensor._spec, requires_grad=False)
                try:
                    used = self._moves.add(
                        tensor, source.receiver(index, name, tensor), options.dtype_of(name, tensor), most
                    )
                    moved = None
                except NotImplementedError:
                    used, moved = tensor.numel() * tensor.element_size(), tensor
            if used < 0 or used > most:
                source.unread(entry)
                break
            add((index, name, moved))
            self.read.append(entry)
            if isinstance(tensor, DTensor) and source.is_cut_over_single_ranks(
                tensor.device_mesh, tensor.placements
            ):
                self._uncut.add(index)
            left -= used
            most = max(left, 0)
            if left <= 0:
                break

    def start(self) -> None:
        self._moves.start()
        self.read.clear()
        for place, (index, name, tensor) in enumerate(self._entries):
            if isinstance(tensor, DTensor):
                self._entries[place] = index, name, _gather_alone(tensor)

    def results(self, kept: dict[int, Tensor | None]) -> Iterator[tuple[str, Tensor | None]]:
        """Yields names and full tensors. ``kept`` has those that come again."""
        options, source, take = self._options, self._source, self._moves.next
        self._entries.reverse()
        while self._entries:
            index, name, full = self._entries.pop()
            first = source.first_of(index)
            if first != index:
                full = kept[first] if source.last_of(index) != index else kept.pop(first)
            else:
                if full is None:
                    full = take()
                elif not options.is_receiver:
                    full = None
                elif full.requires_grad:
                    full = full.detach()
                if index in self._staged and full is not None:
                    full = full.to(self._staged[index])
                if index in self._uncut and full is not None:
                    full = full.clone()
                if source.last_of(index) != index:
                    kept[index] = full
            if full is not None:
                full = options.converted(name, full)
            yield name, full
            del full


@torch.no_grad()
def _gather_alone(tensor: DTensor) -> Tensor:
    """Returns the full tensor of a DTensor that C++ does not move with others."""
    return settled(redistribute(tensor, placements=[Replicate()] * tensor.device_mesh.ndim)._local_tensor)
