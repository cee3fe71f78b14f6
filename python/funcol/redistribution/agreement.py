"""Agreement of ranks on the tensors that they are about to send, and notices of ranks that leave.

The ranks of a call have one control group, known from the start. A batch that goes to another mesh agrees
once; a stream agrees before each bucket, until all ranks have ended. The ranks make one small all_reduce of a
digest of what comes next and of a flag for ranks that leave. If digests differ, the ranks exchange the data
behind them, so that every rank finds the same difference and raises the same error. No tensor is sent before
that, whatever meshes a bucket touches.

The control group has the ranks that a program names, but is a separate group: a rank that drops its stream
and goes on cannot mix its collectives with those that the others still wait for.
"""

from __future__ import annotations

import functools
import hashlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._python_dispatch import _disable_current_modes

from .._compat import new_group_by_name
from .local_redistribute import settled
from .meshes import simulates_ranks
from .specs import has_own_order

_control_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()  # by the world and the ranks
)


def control_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Returns the group by which ``ranks`` agree. All of them must call it; the first call makes it."""
    world = dist.group.WORLD
    assert world is not None
    known = _control_groups.setdefault(world, {})
    members = tuple(sorted(ranks))
    found = known.get(members)
    if found is None:
        if len(members) == dist.get_world_size():
            made: Any = dist.new_group(members)
        else:
            name = hashlib.blake2b(repr(members).encode(), digest_size=16).hexdigest()
            made = new_group_by_name(list(members), f"funcol_control_{name}")
        found = known[members] = made
    return found


class MeshValue(NamedTuple):
    """A mesh, by value."""

    ranks: tuple[int, ...]
    shape: tuple[int, ...]


class TensorValue(NamedTuple):
    """A tensor, by value. ``mesh`` is an index into :attr:`Manifest.meshes`; ``None`` for a plain tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placements: str
    order: str
    device: str
    mesh: int | None
    sent_as: str = "none"  # the requested dtype
    target: str = ""  # the requested placements


_COMPARED_FIELDS = {
    "shape": "shape",
    "dtype": "dtype",
    "placements": "placements",
    "order": "shard order",
    "sent_as": "dtype that is asked for",
    "target": "target",
}


class Manifest:
    """The tensors that a rank is about to send and to receive, by value."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.entries: list[TensorValue] = []
        self.meshes: list[MeshValue] = []
        self.ties: frozenset[tuple[int, int]] = frozenset()  # indices of the first and of another one
        self._of_mesh: dict[DeviceMesh, tuple[int, bool]] = {}
        self._text_of: Callable[[tuple[Placement, ...]], str] = functools.cache(str)

    def add(
        self, name: str, tensor: Tensor, dtype: torch.dtype | None = None, target: Sequence[Placement] = ()
    ) -> None:
        sent_as = "none" if dtype is None else str(dtype)
        shape, own = tuple(tensor.shape), str(tensor.dtype)
        if not isinstance(tensor, DTensor):
            self.entries.append(TensorValue(name, shape, own, "", "", tensor.device.type, None, sent_as))
            return
        spec = tensor._spec
        mesh = self._of_mesh.get(spec.mesh)
        if mesh is None:
            mesh = self._of_mesh[spec.mesh] = (
                self.add_mesh(spec.mesh),
                spec.mesh.get_coordinate() is not None,
            )
        number, is_inside = mesh
        placements, wanted = self._text_of(spec.placements), self._text_of(tuple(target)) if target else ""
        order = str(tuple(map(tuple, spec.shard_order))) if has_own_order(spec) else ""
        device = tensor._local_tensor.device.type if is_inside else ""
        self.entries.append(TensorValue(name, shape, own, placements, order, device, number, sent_as, wanted))

    def add_mesh(self, mesh: DeviceMesh) -> int:
        """Adds ``mesh``, whose ranks have to agree, unless it is known. Returns its index."""
        value = mesh_value(mesh)
        if value not in self.meshes:
            self.meshes.append(value)
        return self.meshes.index(value)

    def values(self) -> list[Any]:
        """Returns the manifest as values that JSON can represent."""
        return [self.options, [*map(tuple, self.entries)], [*map(tuple, self.meshes)], sorted(self.ties)]

    @classmethod
    def of(cls, values: list[Any]) -> Manifest:
        """Returns the manifest whose :meth:`values` another rank has sent."""
        options, entries, meshes, ties = values
        made = cls(options)
        made.entries = [TensorValue(name, tuple(shape), *rest) for name, shape, *rest in entries]
        made.meshes = [MeshValue(tuple(ranks), tuple(shape)) for ranks, shape in meshes]
        made.ties = frozenset((first, other) for first, other in ties)
        return made

    def digest(self) -> int:
        """Returns a digest, a number above 0."""
        text = repr(self.values()).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest()) + 1

    def partners(self) -> set[int]:
        """Returns the ranks that have to agree on this manifest."""
        named = self.options.get("to"), self.options.get("src")
        return {rank for mesh in self.meshes for rank in mesh.ranks} | {
            rank for rank in named if rank is not None
        }

    def mesh_of(self, index: int) -> MeshValue | None:
        """Returns the mesh of a tensor; ``None`` for a plain tensor."""
        mesh = self.entries[index].mesh
        return None if mesh is None else self.meshes[mesh]

    def ranks_of(self, index: int) -> tuple[int, ...] | None:
        """Returns the ranks of the mesh of a tensor; ``None`` for a plain tensor."""
        mesh = self.mesh_of(index)
        return None if mesh is None else mesh.ranks


_mesh_values: weakref.WeakKeyDictionary[DeviceMesh, MeshValue] = weakref.WeakKeyDictionary()


def mesh_value(mesh: DeviceMesh) -> MeshValue:
    """Returns ``mesh`` by value. The value is cached, since it takes time in proportion to the ranks."""
    value = _mesh_values.get(mesh)
    if value is None:
        with _disable_current_modes():
            ranks = tuple(mesh.mesh.flatten().tolist())
        value = _mesh_values[mesh] = MeshValue(ranks, tuple(mesh.shape))
    return value


_NO_MANIFEST = 0


class Agreement:
    """The global ranks of a call of ``op``: ``ranks``, or those of ``group`` (``None``: the world). Without
    ``torch.distributed``, :attr:`group` is ``None``."""

    def __init__(self, op: str, group: dist.ProcessGroup | None, ranks: Sequence[int] | None = None) -> None:
        self.op = op
        self._has_ended = False
        self.exchanges_values = False  # equal on all ranks
        self.num_done = 0  # tensors, reported to the others if this rank leaves
        self.group: dist.ProcessGroup | None = None
        self.ranks = [0]
        if dist.is_initialized() and not simulates_ranks():
            with _disable_current_modes():
                self.group = control_group(dist.get_process_group_ranks(group) if ranks is None else ranks)
            self.ranks = dist.get_process_group_ranks(self.group)
            self._device = _device_of(self.group)
        self.own_rank = dist.get_rank() if self.group is not None else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *rest: object) -> None:
        """Reports to the other ranks that this one leaves, if there is an error."""
        if error is not None:
            self.leave(reason_of(error))

    def meet(self, manifest: Manifest) -> dict[int, Manifest]:
        """Waits until all ranks are about to send what ``manifest`` says. Returns the manifests of the ranks
        that send with this one, equal except for the ranks of meshes; raises on all of them if they differ
        in more."""
        self.check_inside(manifest)
        return self._meet(manifest)[0]

    def check_inside(self, manifest: Manifest) -> None:
        """Raises ValueError if a mesh of ``manifest`` has ranks that do not take part."""
        for number, mesh in enumerate(manifest.meshes):
            outside = set(mesh.ranks) - set(self.ranks)
            if outside and self.group is not None:
                name = next(entry.name for entry in manifest.entries if entry.mesh == number)
                raise ValueError(
                    f"funcol::{self.op}: '{name}' is on a mesh with rank {min(outside)}, which does not "
                    "take part. Pass a group with all ranks of all meshes as group."
                )

    def _meet(self, manifest: Manifest | None, continues: bool = True) -> tuple[dict[int, Manifest], bool]:
        """Joins the exchange of the ranks. Without a manifest, this rank sends what was agreed before.
        Returns the manifests of the ranks that send with this one, and true if a rank goes on."""
        if self.group is None:
            return {} if manifest is None else {self.own_rank: manifest}, False
        content = _NO_MANIFEST if manifest is None else manifest.digest()
        high, low, left, going = self._reduce_max(content, -content, leaves=False, continues=continues)
        if left:
            self._has_ended = True
            reasons = {rank: one for rank, one in self._gather("null").items() if one is not None}
            rank, (num_done, reason) = min(reasons.items())
            raise RuntimeError(
                f"funcol::{self.op}: rank {rank} left after {num_done} tensors: {reason}. Take all "
                "tensors on every rank, or leave on all alike."
            )
        if high != -low:
            return self._compare_all(manifest), bool(going)
        return {} if manifest is None else dict.fromkeys(self.ranks, manifest), bool(going)

    def _compare_all(self, manifest: Manifest | None) -> dict[int, Manifest]:
        """Returns the manifests of the ranks that have to agree with this one. Raises ValueError on all ranks
        if ranks that have to agree do not."""
        given = self._gather(json.dumps(manifest and manifest.values()))
        found = {rank: Manifest.of(one) for rank, one in given.items() if one is not None}
        parts = [{rank: found[rank] for rank in part} for part in sets_that_agree(found)]
        try:
            for part in parts:
                compare(part, self.op)
        except ValueError:
            self._has_ended = True  # all ranks raise
            raise
        return next((part for part in parts if self.own_rank in part), {})

    def exchange(self, value: object) -> dict[int, Any]:
        """Sends ``value`` to all ranks. Returns the value of each rank, as JSON represents it, by rank."""
        text = json.dumps(value)  # TypeError before others wait for it
        self._meet(None)
        return self._gather(text)

    def meet_for_bucket(self, value: object = None) -> dict[int, Any]:
        """Waits until all ranks are about to send a bucket, or have ended. Returns the values that they pass,
        if :attr:`exchanges_values`."""
        text = json.dumps(value)
        self._meet(None)
        return self._gather(text) if self.exchanges_values else {}

    def end(self, manifest: Manifest | None = None) -> None:
        """Waits until all ranks have ended. ``manifest`` is an empty one if ranks meet before each bucket."""
        while self._meet(manifest, continues=False)[1]:
            if self.exchanges_values:
                self._gather("null")
        self._has_ended = True

    def leave(self, reason: str) -> None:
        """Reports to all ranks that this one leaves before the end, unless all have raised."""
        if self._has_ended or self.group is None or not dist.is_initialized():
            return
        self._has_ended = True
        self._reduce_max(0, 0, leaves=True, continues=False)
        self._gather(json.dumps((self.num_done, reason)))

    def _reduce_max(self, high: int, low: int, leaves: bool, continues: bool) -> list[int]:
        with _disable_current_modes():
            numbers = torch.tensor([high, low, leaves, continues], dtype=torch.int64, device=self._device)
            dist.all_reduce(numbers, dist.ReduceOp.MAX, self.group)
            return numbers.tolist()

    def _gather(self, given: str) -> dict[int, Any]:
        """Returns the values that the ranks give in JSON, by rank."""
        if self.group is None:
            return {self.own_rank: json.loads(given)}
        text = given.encode()
        with _disable_current_modes():
            size = torch.tensor(len(text), device=self._device)
            dist.all_reduce(size, dist.ReduceOp.MAX, self.group)
            padded = torch.frombuffer(bytearray(text.ljust(int(size))), dtype=torch.uint8).to(self._device)
            found = [torch.empty_like(padded) for _ in self.ranks]
            dist.all_gather(found, padded, self.group)
            texts = [bytes(one.tolist()) for one in found]
        return {rank: json.loads(text) for rank, text in zip(self.ranks, texts, strict=True)}


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Returns the device of numbers that ``group`` reduces: the CPU, if ``group`` supports it."""
    devices = {device.type for device in group._device_types}
    if not devices or "cpu" in devices:
        return torch.device("cpu")
    return torch.device(min(devices), torch.get_device_module(min(devices)).current_device())


def device_for(types: set[str], group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device from which ``group`` sends tensors on devices of ``types``: the single type if
    ``group`` supports it, else the device on which it reduces numbers."""
    known = set() if group is None else {device.type for device in group._device_types}
    if len(types) == 1 and (types <= known or not known):
        (only,) = types
        return torch.device(only) if only == "cpu" else torch.empty(0, device=only).device
    return torch.device("cpu") if group is None else _device_of(group)


def sets_that_agree(manifests: Mapping[int, Manifest]) -> list[list[int]]:
    """Returns the sets of ranks that have to agree: those of one mesh, and those that name a rank of it as
    ``to`` or ``src``."""
    part_of = {rank: {rank} for rank in manifests}

    for rank, manifest in manifests.items():
        for other in manifest.partners():
            if other in part_of and part_of[other] is not part_of[rank]:
                part_of[rank] |= part_of[other]
                for moved in part_of[other]:
                    part_of[moved] = part_of[rank]
    return [sorted(part) for part in {id(part): part for part in part_of.values()}.values()]


def compare(manifests: Mapping[int, Manifest], op: str) -> None:
    """Raises ValueError with the first difference between ``manifests``, which are by rank."""
    for what, values in _values_to_compare(manifests):
        found: dict[Any, list[int]] = {}
        for rank, value in values.items():
            found.setdefault(value, []).append(rank)
        if len(found) > 1:
            raise ValueError(
                f"funcol::{op}: the ranks go through different tensors: {what} {_list_by_rank(found)}. Pass "
                "the same names, shapes, dtypes and placements in the same order, and the same options, on "
                "every rank."
            )


def _values_to_compare(manifests: Mapping[int, Manifest]) -> Iterator[tuple[str, dict[int, Any]]]:
    """Yields, in words, what has to be equal, and its value on each rank, if the values before are equal."""
    for option in next(iter(manifests.values())).options:
        yield f"{option} is", {rank: one.options[option] for rank, one in manifests.items()}
    for index in range(max(len(one.entries) for one in manifests.values())):
        here = {rank: one.entries[index] for rank, one in manifests.items() if index < len(one.entries)}
        yield (
            f"tensor {index} is",
            {rank: f"'{here[rank].name}'" if rank in here else "missing" for rank in manifests},
        )
        name = next(iter(here.values())).name
        for field, word in _COMPARED_FIELDS.items():
            yield f"the {word} of '{name}' is", {rank: getattr(entry, field) for rank, entry in here.items()}
        yield f"'{name}' is on", {rank: entry.device for rank, entry in here.items() if entry.device}
        meshes = {rank: one.mesh_of(index) for rank, one in manifests.items()}
        for ranks in {mesh.ranks for mesh in meshes.values() if mesh is not None}:
            of_mesh = {rank: meshes[rank] for rank in ranks}
            yield (
                f"the mesh of '{name}' has the ranks",
                {rank: one and one.ranks for rank, one in of_mesh.items()},
            )
            yield (
                f"the mesh of '{name}' has the shape",
                {rank: one and one.shape for rank, one in of_mesh.items()},
            )


def _list_by_rank(found: Mapping[Any, Sequence[int]]) -> str:
    def of(ranks: Sequence[int]) -> str:
        listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        return f"on rank {listed}" if len(ranks) == 1 else f"on ranks {listed}"

    # Fewest ranks first: most likely they are the ones that are wrong.
    return ", ".join(
        f"{value} {of(ranks)}" for value, ranks in sorted(found.items(), key=lambda one: len(one[1]))
    )


def own_ties(tensors: Iterable[Tensor]) -> frozenset[tuple[int, int]]:
    """Returns pairs of indices, ``(first, other)``, for each DTensor that is on this rank the same as an
    earlier one: in the same memory, of the same layout."""
    by_memory: dict[int, list[tuple[int, DTensor]]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor):
            memory = settled(tensor._local_tensor).untyped_storage()._cdata
            by_memory.setdefault(memory, []).append((index, tensor))
    firsts: dict[Any, int] = {}
    found = set()
    for sharing in by_memory.values():
        for index, tensor in sharing if len(sharing) > 1 else ():
            if tensor._local_tensor.numel() == 0:
                continue
            spec = tensor._spec
            order = str(spec.shard_order) if has_own_order(spec) else ""
            layout = tuple(tensor.shape), spec.mesh, tuple(spec.placements), order
            first = firsts.setdefault((memory_key(tensor._local_tensor), layout), index)
            if first != index:
                found.add((first, index))
    return frozenset(found)


def agreed_ties(manifests: Mapping[int, Manifest]) -> dict[int, int]:
    """Returns the index of the first tensor for each tensor that is tied to it, by index. All ranks of their
    mesh have to find them tied."""
    found = {}
    for first, other in set().union(*(one.ties for one in manifests.values())):
        concerned = [
            one
            for rank, one in manifests.items()
            if rank in (one.ranks_of(first) or ()) or len(manifests) == 1
        ]
        if all((first, other) in one.ties for one in concerned):
            found[other] = first
    return found


def memory_key(tensor: Tensor) -> Any:
    """Returns a key that is equal for two tensors if they are the same elements of the same memory."""
    held = settled(tensor)
    return (
        held.untyped_storage()._cdata,
        held.storage_offset(),
        tuple(held.shape),
        held.stride(),
        held.dtype,
        held.is_conj(),
        held.is_neg(),
    )


def reason_of(error: BaseException) -> str:
    """Returns a line that describes ``error``, for the other ranks."""
    line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def staging_device(tensor: DTensor) -> torch.device | None:
    """Returns the device of the tensor's mesh, through which a shard on the CPU is sent and received
    (parameters that FSDP2 offloads); ``None`` if it is there, or on ranks outside of the mesh."""
    mesh = tensor._spec.mesh
    if tensor._local_tensor.device.type == mesh.device_type or mesh.get_coordinate() is None:
        return None
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
