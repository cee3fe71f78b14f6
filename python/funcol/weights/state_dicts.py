"""State dicts of whole tensors: out of a sharded model to one rank, and from one rank into it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

from .. import _C
from .._progress import Progress
from ..redistribution.meshes import root_mesh
from ..redistribution.moving import settled
from ..redistribution.specs import has_own_order, spec_of
from .export import full_tensors, tied
from .in_step import InStep, number_of

_LOAD = "load_full_state_dict"


def full_state_dict(
    model: nn.Module,
    to: int | None = 0,
    *,
    bucket_bytes: int = 256 << 20,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """``model.state_dict()`` with whole tensors, on global rank ``to``; an empty dict on the others. With
    ``to=None`` every rank gets it.

    All ranks call it alike. The tensors are streamed (:func:`full_tensors`, which has the other arguments
    and the errors): with ``device="cpu"`` a device holds two buckets at a time, and not the whole model.
    They share no memory with the model; tied ones are one tensor. Entries that are no tensors stay as they
    are.

    PyTorch counterpart: ``get_model_state_dict`` with ``full_state_dict=True``.
    """
    state = model.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    copies: dict[int, Tensor] = {}
    wholes: dict[str, Any] = {}
    stream = full_tensors(
        tensors, to=to, bucket_bytes=bucket_bytes, dtype=dtype, device=device, progress=progress
    )
    for name, whole in stream:
        if whole is None:
            continue
        held = _local_of(tensors[name])
        memory = whole.untyped_storage()._cdata
        if memory == held.untyped_storage()._cdata:
            if memory not in copies or copies[memory].shape != whole.shape:
                copies[memory] = whole.clone()
            whole = copies[memory]
        wholes[name] = whole
    if to is not None and to != _own_rank():
        return {}
    return {
        name: wholes.get(name, value)
        for name, value in state.items()
        if name in wholes or name not in tensors
    }


def load_full_state_dict(
    model: nn.Module,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None,
    src: int = 0,
    *,
    bucket_bytes: int = 256 << 20,
    progress: bool = False,
) -> None:
    """Copies whole tensors, which global rank ``src`` has, into the parameters and buffers of ``model``: each
    rank receives its shards alone.

    All ranks call it alike; ``tensors`` counts on ``src``: a mapping, which may read each tensor when it is
    asked for it, or pairs of names and tensors, read as far as they are needed, best in the order of
    ``model.state_dict()``. Tensors may have any dtype and device; they get those of the model. Consecutive
    ones of ``bucket_bytes`` go together, by one all_to_all for each dtype and mesh, while the bucket before
    is copied. Tied tensors are sent once; ``src`` sends to all replicas, those on other submeshes included.
    ``progress``: ``src`` shows on its terminal how many tensors are sent, and how long the rest takes.

    ``ValueError`` on ``src``, before anything is sent, if a name is missing or unknown, before a bucket is
    sent if a shape is wrong; on the others a ``RuntimeError``, which says that ``src`` gave up.
    ``ValueError`` on all ranks if ``src`` is not part of a tensor's mesh, or a parameter is partial or has
    masks.

    PyTorch counterpart: ``set_model_state_dict`` with ``full_state_dict=True, broadcast_from_rank0=True``.
    """
    if bucket_bytes < 1:
        raise ValueError(f"funcol::{_LOAD}: bucket_bytes is {bucket_bytes}, expected a number of 1 or more.")
    state = [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    same = tied(state)
    loading = _Loading(state, {index for index, (first, _) in same.items() if index != first}, src)
    in_step = InStep(_LOAD, [target.mesh for target in loading.targets if target.mesh is not None])
    num_done = 0
    with Progress(_LOAD, len(loading.targets), is_on=progress and src == _own_rank()) as shown:
        try:
            source = _Wholes(tensors, [name for name, _ in state]) if src == _own_rank() else None
            before: list[tuple[_Target, Tensor]] = []
            for bucket in loading.buckets(bucket_bytes):
                shown.show(bucket[0].name)
                wholes = [None if source is None else source.whole_of(target) for target in bucket]
                in_step.go_on(
                    dict.fromkeys(target.mesh for target in bucket if target.mesh is not None),
                    number_of(zlib.crc32("\n".join(target.name for target in bucket).encode())),
                    num_done,
                    bucket[0].name,
                )
                started = loading.start(bucket, wholes)
                del wholes
                _copy(before)
                before = started
                num_done += len(bucket)
                shown.advance(len(bucket))
            in_step.end(num_done)
            _copy(before)
        finally:
            in_step.leave(num_done)


class _Target:
    """A tensor of the model, and where it is."""

    def __init__(self, name: str, tensor: Tensor, mesh: DeviceMesh | None) -> None:
        self.name = name
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.local = _local_of(tensor)
        if isinstance(tensor, DTensor):
            self.spec: DTensorSpec | None = _on_root(tensor._spec)
            mesh = self.spec.mesh
        else:
            self.spec = None if mesh is None else spec_of(mesh, (Replicate(),) * mesh.ndim, tensor)
        self.mesh = mesh

    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class _Loading:
    """The targets of a call, in the order of the model, and how rank ``src`` sends to them."""

    def __init__(self, state: list[tuple[str, Tensor]], skipped: set[int], src: int) -> None:
        self._src = src
        self._owners: dict[DeviceMesh, int] = {}
        meshes = (root_mesh(value.device_mesh) for _, value in state if isinstance(value, DTensor))
        mesh = next((mesh for mesh in meshes if src in mesh.mesh.flatten().tolist()), None)
        self.targets = [
            _Target(name, value, mesh) for index, (name, value) in enumerate(state) if index not in skipped
        ]
        for target in self.targets:
            self._check(target)

    def _check(self, target: _Target) -> None:
        if target.spec is None or target.mesh is None:
            return
        if any(placement.is_partial() for placement in target.spec.placements):
            raise ValueError(
                f"funcol::{_LOAD}: '{target.name}' has the placements {target.spec.placements}. Reduce "
                "it first: a whole tensor is loaded into shards and replicas."
            )
        if target.mesh not in self._owners:
            ranks = target.mesh.mesh.flatten().tolist()
            if self._src not in ranks:
                raise ValueError(
                    f"funcol::{_LOAD}: '{target.name}' is on {target.mesh}, which rank {self._src} is not "
                    "part of. Pass a rank of every tensor's mesh as src."
                )
            self._owners[target.mesh] = ranks.index(self._src)

    def buckets(self, most: int) -> Iterator[list[_Target]]:
        bucket: list[_Target] = []
        left = most
        for target in self.targets:
            if bucket and target.num_bytes() > left:
                yield bucket
                bucket, left = [], most
            bucket.append(target)
            left -= target.num_bytes()
        if bucket:
            yield bucket

    def start(self, bucket: list[_Target], wholes: list[Tensor | None]) -> list[tuple[_Target, Tensor]]:
        """Sends a bucket; what this rank gets of it may be pending."""
        started: list[tuple[_Target, Tensor]] = []
        by_mesh: dict[DeviceMesh | None, list[int]] = {}
        for index, target in enumerate(bucket):
            by_mesh.setdefault(target.mesh, []).append(index)
        for mesh, indices in by_mesh.items():
            if mesh is None:
                started += [
                    (bucket[index], self._broadcast(bucket[index], wholes[index])) for index in indices
                ]
            elif mesh.get_coordinate() is not None:
                moved = _C.move_from_owners(
                    [wholes[index] for index in indices],
                    [bucket[index].spec for index in indices],
                    [self._owners[mesh]] * len(indices),
                    [None] * len(indices),
                    True,
                    None,
                )
                started += [
                    (bucket[index], dtensor._local_tensor)
                    for index, dtensor in zip(indices, moved, strict=True)
                ]
        return started

    def _broadcast(self, target: _Target, whole: Tensor | None) -> Tensor:
        """A tensor of a model that is on no mesh goes to all ranks."""
        held = torch.empty(target.shape, dtype=target.dtype, device=target.local.device)
        received = held if whole is None else whole
        if dist.is_initialized():
            dist.broadcast(received, self._src)
        return received


class _Wholes:
    """The tensors of rank ``src``, by name."""

    def __init__(
        self, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None, names: list[str]
    ) -> None:
        if tensors is None:
            raise ValueError(
                f"funcol::{_LOAD}: no tensors on the rank that is to send them. Pass them there."
            )
        self._known = frozenset(names)
        self._mapping = tensors if isinstance(tensors, Mapping) else None
        self._pairs = iter(()) if isinstance(tensors, Mapping) else iter(tensors)
        self._early: dict[str, Tensor] = {}
        if self._mapping is not None:
            self._check_known(self._mapping)
            missing = [name for name in names if name not in self._mapping]
            if missing:
                self._refuse_missing(missing)

    def whole_of(self, target: _Target) -> Tensor:
        """The tensor of ``target``, checked, with the dtype and on the device of the model."""
        whole = self._find(target.name)
        if whole.shape != target.shape:
            raise ValueError(
                f"funcol::{_LOAD}: '{target.name}' has shape {tuple(whole.shape)}, in the model "
                f"{tuple(target.shape)}. Pass the whole tensor."
            )
        return whole.detach().to(device=target.local.device, dtype=target.dtype)

    def _find(self, name: str) -> Tensor:
        if self._mapping is not None:
            return self._mapping[name]
        while name not in self._early:
            pair = next(self._pairs, None)
            if pair is None:
                self._refuse_missing([name])
            self._check_known([pair[0]])
            self._early[pair[0]] = pair[1]
        return self._early.pop(name)

    def _check_known(self, names: Iterable[str]) -> None:
        unknown = [name for name in names if name not in self._known]
        if unknown:
            listed = ", ".join(map(repr, unknown[:10]))
            raise ValueError(f"funcol::{_LOAD}: the model has no tensor {listed}. Leave it out.")

    def _refuse_missing(self, names: list[str]) -> NoReturn:
        listed = ", ".join(map(repr, names[:10]))
        raise ValueError(
            f"funcol::{_LOAD}: {listed} of the model is missing. Pass every tensor of its state_dict()."
        )


@torch.no_grad()
def _copy(started: list[tuple[_Target, Tensor]]) -> None:
    for target, received in started:
        if target.local.numel() > 0:
            target.local.copy_(received)


def _on_root(spec: DTensorSpec) -> DTensorSpec:
    """``spec``, if it is of a submesh, on the mesh that this one was cut from: other submeshes hold
    replicas."""
    mesh, root = spec.mesh, root_mesh(spec.mesh)
    names, of_root = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if mesh is root or not all(name in of_root for name in names):
        return spec
    axes = [of_root.index(name) for name in names]
    placements: list[Placement] = [Replicate()] * root.ndim
    for axis, placement in zip(axes, spec.placements, strict=True):
        placements[axis] = placement
    order = None
    if has_own_order(spec):
        order = tuple(
            ShardOrderEntry(entry.tensor_dim, tuple(axes[axis] for axis in entry.mesh_dims))
            for entry in spec.shard_order
        )
    return DTensorSpec(root, tuple(placements), tensor_meta=spec.tensor_meta, shard_order=order)  # type: ignore[arg-type]


def _local_of(tensor: Tensor) -> Tensor:
    return settled(tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
